package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// picky refuses messages of a key that begins with "bad", until it is mended.
type picky struct{ mended atomic.Bool }

func (s *picky) handle(ctx context.Context, m *relay.Message) error {
	if strings.HasPrefix(m.Key, "bad") && !s.mended.Load() {
		return relay.Refused(errors.New("too large"))
	}
	return slow(time.Millisecond)(ctx, m)
}

// commitFacts commits keyed messages in order, with their facts.
func (p testDB) commitFacts(t testing.TB, msgs []*message.Message) {
	t.Helper()
	box := p.box(t)
	err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		for i, m := range msgs {
			if _, err := tx.ExecContext(ctx, `insert into facts values ($1, $2, $3)`, m.UUID, m.Metadata.Get(outbox.KeyMetadata), i); err != nil {
				return err
			}
		}
		return box.Publisher(tx).Publish("orders", msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A running system is dumped and restored into a new cluster, which goes on from
// there: everything that it holds arrives, what had arrived before arrives again if
// the dump still owed it.
func TestRelay_LosesNothingThatARestoredServerHolds(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	p := onServer(t, server)
	p.execute(t, makeFacts)
	w, gate := &wire{}, &picky{}
	cfg := relay.Config{Lease: 2 * time.Second, Retry: relay.Retry{Initial: 100 * time.Millisecond, Max: 200 * time.Millisecond, MaxAttempts: 1000}}
	var workers []running
	for _, name := range []string{"a", "b"} {
		workers = append(workers, start(t, p.box(t), &sink{name: name, wire: w, handle: gate.handle}, cfg))
	}
	var bad []*message.Message
	for k := range 5 {
		bad = append(bad, keyed(fmt.Sprint("bad", k), 0, 20)...)
	}
	p.commitFacts(t, bad)
	load := p.produce(t, 4, 2*time.Millisecond)
	eventually(t, "traffic, and all that is refused parked", func() bool {
		return load.count() > testserver.Rounds(200, 500) && p.count(t, `select count(*) from {{parked}}`) == len(bad)
	})
	file := filepath.Join(t.TempDir(), "dump.sql")
	server.Dump(file)
	atDump, arrived := load.count(), w.distinct()
	eventually(t, "traffic after the dump", func() bool { return load.count() > atDump+testserver.Rounds(150, 300) })
	load.halt()
	for _, r := range workers {
		r.stop()
	}

	restored := testserver.PrivatePostgres(t)
	restored.Load(file)
	q := p
	q.db = restored.Open()
	before := map[string]bool{}
	for _, a := range w.all() {
		before[a.message] = true
	}
	owed, again := 0, 0
	for _, id := range q.texts(t, `
		select message_id from {{outbox}} union all select message_id from {{parked}} union all select message_id from {{scheduled}}`) {
		owed++
		if before[id] {
			again++
		}
	}
	if owed < len(bad) {
		t.Fatalf("the restored server owes %d messages, of which %d were parked: the test shows nothing", owed, len(bad))
	}
	gate.mended.Store(true)
	anew := &wire{}
	r := start(t, q.box(t), &sink{name: "restored", wire: anew, handle: gate.handle}, cfg)
	more := q.produce(t, 4, 2*time.Millisecond)
	eventually(t, "traffic on the new server", func() bool { return more.count() > testserver.Rounds(100, 300) })
	more.halt()
	q.awaitNothingOwedInAll(t)

	// What the restored server owed or got since has arrived there, once; the
	// rest, which it holds as facts, had arrived before the dump.
	fresh := anew.distinct()
	if n := anew.count(); n != fresh || fresh != owed+more.count() {
		t.Errorf("%d messages arrived, %d distinct ones; %d were owed and %d came since", n, fresh, owed, more.count())
	}
	both := &wire{sent: append(w.all(), anew.all()...)}
	c := q.audit(t, both)
	t.Logf("%d had arrived at the dump, which owes %d, %d of them delivered since: in the end %v", arrived, owed, again, c)
	if c.repeats != again {
		t.Errorf("%d repeats, want the %d that the dump still owed", c.repeats, again)
	}
	r.stop()
}

// subscription is a server that follows another one by logical replication of all
// its tables.
func subscribe(t testing.TB, p testDB, publisher, subscriber *testserver.PostgresServer) testDB {
	t.Helper()
	file := filepath.Join(t.TempDir(), "schema.sql")
	publisher.Dump(file, "--schema-only", "--no-publications")
	subscriber.Load(file)
	p.execute(t, `create publication everything for all tables`)
	s := p
	s.db = subscriber.Open()
	s.execute(t, fmt.Sprintf(`create subscription everything connection '%s' publication everything`, publisher.DSN()))
	return s
}

// All tables of a working relay are published: what it deletes and moves goes on
// being deleted and moved, here and there. On the subscriber, to which sequences do
// not come, a relay refuses to work until they are repaired.
func TestRelay_WorksWithAllTablesPublishedAndOnTheSubscriberOnceRepaired(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	publisher, subscriber := testserver.PrivatePostgres(t, "wal_level=logical"), testserver.PrivatePostgres(t)
	p := onServer(t, publisher)
	p.execute(t, makeFacts)
	// The days of the history have to be there before they are copied, and one of
	// them is long past and to be archived, which deletes its rows.
	history := p.boxOn(t, p.db, time.Hour)
	if _, err := outboxqueue.Of(history).Maintain(t.Context(), unguarded); err != nil {
		t.Fatal(err)
	}
	day := func(days int) (name, date string) {
		at := time.Now().UTC().AddDate(0, 0, days)
		return `"oncemill"."outbox_history_` + at.Format("20060102") + `"`, at.Format("2006-01-02 00:00:00+00")
	}
	ahead, _ := day(2)
	past, from := day(-3)
	_, until := day(-2)
	p.execute(t, `alter table {{outbox_history}} detach partition `+ahead)
	p.execute(t, `alter table `+ahead+` rename to `+strings.Trim(strings.TrimPrefix(past, `"oncemill".`), `"`))
	p.execute(t, `alter table {{outbox_history}} attach partition `+past+` for values from ('`+from+`') to ('`+until+`')`)
	p.execute(t, `
		insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
		select -i, 1, 'orders', 'old ' || i, '', '', '', $1, $1 from generate_series(1, 700) i`, from)
	s := subscribe(t, p, publisher, subscriber)
	eventually(t, "the long past day is copied", func() bool { // its table is about to go
		return s.count(t, `select count(*) from pg_subscription_rel where srrelid = $1::regclass and srsubstate in ('s', 'r')`, past) == 1
	})

	w, gate, log := &wire{}, &picky{}, &complaints{}
	archived := atomic.Int64{}
	box, err := outbox.New(p.db, outbox.Config{
		Database: p.cfg, History: time.Hour, Logger: slog.New(log),
		Archive: func(_ context.Context, rows []outbox.HistoryRow) error { archived.Add(int64(len(rows))); return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg := relay.Config{Lease: 30 * time.Second, Logger: slog.New(log), Retry: relay.Retry{Initial: 50 * time.Millisecond, Max: 100 * time.Millisecond, MaxAttempts: 3}}
	r := start(t, box, &sink{name: "publisher", wire: w, handle: gate.handle}, cfg)
	bad := slices.Concat(keyed("bad1", 0, 3), keyed("bad2", 0, 2))
	p.commitFacts(t, bad)
	load := p.produce(t, 2, 5*time.Millisecond)
	eventually(t, "dead letters", func() bool { return p.count(t, `select count(*) from {{dead_letters}}`) == len(bad) })
	eventually(t, "scheduled messages arrive", func() bool { return r.counter(t, "oncemill.relay.scheduled_moved") > 5 })
	eventually(t, "history", func() bool { return p.count(t, `select count(*) from {{outbox_history}}`) > 200 })
	eventually(t, "the past is archived", func() bool { return archived.Load() >= 700 })
	gate.mended.Store(true)
	letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	for i := range bad {
		if _, err := letters.Replay(t.Context(), []int64{int64(p.count(t, `select id from {{dead_letters}} order by id offset $1 limit 1`, i))}, dlq.Act{By: "ada"}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "they are replayed", func() bool {
		return p.count(t, `select count(*) from {{dead_letters}} where state = 'replayed'`) == len(bad)
	})
	load.halt()
	p.awaitNothingOwedInAll(t)
	r.stop()
	if n := log.all(); len(n) > 0 {
		t.Errorf("complaints: %v", n)
	}

	// The last thing that the publisher does is to owe something.
	last := slices.Concat(keyed("last1", 0, 10), keyed("last2", 0, 10))
	p.commitFacts(t, last)
	eventually(t, "the subscriber has it all", func() bool {
		return s.count(t, `select count(*) from pg_subscription_rel where srsubstate <> 'r'`) == 0 && s.count(t, `select count(*) from facts`) == p.count(t, `select count(*) from facts`) && s.owedInAll(t) == p.owedInAll(t)
	})
	s.execute(t, `drop subscription everything`)
	for _, table := range []string{"outbox", "parked", "scheduled", "dead_letters", "outbox_history", "relay_leases", "relay_workers"} {
		query := `select count(*) from {{` + table + `}}`
		if here, there := p.count(t, query), s.count(t, query); here != there {
			t.Errorf("%d rows in %s, %d at the subscriber", here, table, there)
		}
	}
	refused, err := relay.New(s.box(t), &sink{wire: &wire{}}, relay.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if err := refused.Run(t.Context()); !errors.Is(err, outbox.ErrSequenceBehind) {
		t.Errorf("error %v, want ErrSequenceBehind", err)
	}
	if _, err := relay.RepairSequence(t.Context(), s.box(t)); err != nil {
		t.Fatal(err)
	}
	anew := &wire{}
	start(t, s.box(t), &sink{name: "subscriber", wire: anew}, relay.Config{Lease: 30 * time.Second}) // no lane changes hands on a busy machine
	more := s.produce(t, 2, 5*time.Millisecond)
	eventually(t, "traffic at the subscriber", func() bool { return more.count() > 100 })
	more.halt()
	s.awaitNothingOwedInAll(t)
	if n := anew.count(); n != anew.distinct() || n != len(last)+more.count() {
		t.Errorf("%d messages arrived, %d distinct; %d were owed and %d came since", n, anew.distinct(), len(last), more.count())
	}
}

// complaints are what was logged as a warning or worse, but for refused messages.
type complaints struct {
	mu  sync.Mutex
	log []string
}

func (c *complaints) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn
}
func (c *complaints) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *complaints) WithGroup(string) slog.Handler      { return c }

func (c *complaints) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "message refused") || strings.HasPrefix(r.Message, "message dead-lettered") {
		return nil
	}
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += fmt.Sprintf(" %s=%v", a.Key, a.Value); return true })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = append(c.log, text)
	return nil
}

func (c *complaints) all() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.log)
}

// PostgreSQL stops at once, in the middle of the traffic, and stays away for
// longer than all leases.
func TestRelay_ResumesAfterPostgresWasAway(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	const outage = 10 * time.Second
	server := testserver.PrivatePostgres(t)
	p := onServer(t, server)
	p.execute(t, makeFacts)
	w := &wire{}
	var workers []running
	for _, name := range []string{"a", "b"} {
		workers = append(workers, start(t, p.box(t), &sink{name: name, wire: w, handle: slow(3 * time.Millisecond)}, relay.Config{Lease: 2 * time.Second}))
	}
	load := p.produce(t, 6, 2*time.Millisecond)
	eventually(t, "traffic", func() bool { return load.count() > 500 })
	server.Crash()
	testserver.Pause(t.Context(), outage)
	before, n := w.count(), load.count()
	server.Start()
	begin := time.Now()
	eventually(t, "the first message", func() bool { return w.count() > before })
	took := time.Since(begin)
	eventually(t, "traffic", func() bool { return load.count() > n+500 })
	load.halt()
	p.awaitNothingOwedInAll(t)
	c := p.audit(t, w)
	t.Logf("%v without PostgreSQL; the first message %v after its start; in the end %v", outage, took.Round(time.Millisecond), c)
	if c.ghosts > 0 {
		t.Errorf("%d ghosts", c.ghosts)
	}
	for _, r := range workers {
		if n := r.outcomes(t, "refused") + r.outcomes(t, "unknown") + r.counter(t, "oncemill.relay.retries"); n > 0 {
			t.Errorf("%d messages were charged", n)
		}
		r.stop()
	}
	if n := p.count(t, `select count(*) from {{relay_leases}} where crashes > 0`); n > 0 {
		t.Errorf("crashes counted for %d lanes: it was the database", n)
	}
}
