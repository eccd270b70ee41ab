package oncemill_test

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// shop is a server whose roles have what docs/operations.md grants them.
type shop struct {
	admin, owner, producer, stock, operator *sql.DB

	box      *outbox.Outbox // the relay's
	shelf    *outbox.Outbox // the producer's
	onward   *outbox.Outbox // the consumer's
	letters  *dlq.Store     // the operator's
	consumer *inbox.Inbox   // named stock
	broker   *choosy
}

// choosy is a broker that refuses some messages, and what was published there.
type choosy struct {
	mu      sync.Mutex
	refuses map[string]bool
	got     map[string][]*message.Message // by UUID
}

func (b *choosy) Publish(_ string, messages ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range messages {
		if b.refuses[m.UUID] {
			return relay.Refused(errors.New("not here"))
		}
		b.got[m.UUID] = append(b.got[m.UUID], m)
	}
	return nil
}

func (b *choosy) Close() error { return nil }

func (b *choosy) refuse(yes bool, ids ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, id := range ids {
		b.refuses[id] = yes
	}
}

func (b *choosy) published(id string) []*message.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.got[id]
}

var documentedSQL = regexp.MustCompile("(?ms)^```sql\n-- as (the administrator|shop_owner)\n(.*?)^```$")

// newShop executes the SQL of the document as it stands there.
func newShop(t *testing.T) *shop {
	t.Helper()
	server := testserver.PrivatePostgres(t)
	must := func(_ sql.Result, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(server.Open().ExecContext(t.Context(), `create database shop`))
	s := &shop{admin: server.OpenAs("postgres", "shop"), broker: &choosy{refuses: map[string]bool{}, got: map[string][]*message.Message{}}}
	for role, db := range map[string]**sql.DB{"owner": &s.owner, "producer": &s.producer, "stock": &s.stock, "operator": &s.operator} {
		must(s.admin.ExecContext(t.Context(), `create role shop_`+role+` login password 'postgres'`))
		*db = server.OpenAs("shop_"+role, "shop")
	}
	document, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	migrated := false
	for _, block := range documentedSQL.FindAllSubmatch(document, -1) {
		db := s.admin
		if string(block[1]) == "shop_owner" {
			db = s.owner
			if !migrated {
				migrated = true
				if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := db.ExecContext(t.Context(), string(block[2])); err != nil {
			t.Fatalf("%v in\n%s", err, block[0])
		}
	}
	if !migrated {
		t.Fatal("docs/operations.md has no SQL of roles")
	}
	must(s.owner.ExecContext(t.Context(), `create table oncemill.effects (note text not null)`))
	must(s.owner.ExecContext(t.Context(), `grant select, insert on oncemill.effects to shop_stock`))

	quiet := slog.New(slog.DiscardHandler)
	var errs [5]error
	s.box, errs[0] = outbox.New(s.owner, outbox.Config{Logger: quiet})
	s.shelf, errs[1] = outbox.New(s.producer, outbox.Config{Logger: quiet})
	s.letters, errs[2] = dlq.New(s.operator, dlq.Config{})
	own, err := dlq.New(s.stock, dlq.Config{})
	errs[3] = err
	s.onward, err = outbox.New(s.stock, outbox.Config{Logger: quiet})
	if err := errors.Join(append(errs[:], err)...); err != nil {
		t.Fatal(err)
	}
	s.consumer, err = inbox.New(s.stock, inbox.Config{
		Consumer: "stock", Outbox: s.onward, DeadLetters: inbox.LettersOf(own), Logger: quiet,
		Replays: &inbox.Replays{Letters: own, Publisher: s.broker, Topic: func(*dlq.Letter) string { return "orders" }},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// run starts a relay as the owner. The function ends it.
func (s *shop) run(t *testing.T) (stop func()) {
	t.Helper()
	worker, err := relay.New(s.box, relay.FromPublisher(s.broker), relay.Config{Retry: relay.Retry{MaxAttempts: 1}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the relay: %v", err)
		}
	}
}

// publish publishes messages as the producer; those with a time are scheduled.
func (s *shop) publish(t *testing.T, after time.Duration, ids ...string) {
	t.Helper()
	err := s.shelf.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		for _, id := range ids {
			m := message.NewMessage(id, []byte(id))
			outbox.SetKey(m, "key of "+id)
			if after > 0 {
				outbox.SetDeliverAfter(m, after)
			}
			if err := s.shelf.Publisher(tx).Publish("orders", m); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// consume hands a message to the consumer, whose handler writes an effect, and
// publishes; it fails for good if the payload is bad.
func (s *shop) consume(t *testing.T, m *message.Message, bad bool) {
	t.Helper()
	handler := s.consumer.Middleware(func(m *message.Message) ([]*message.Message, error) {
		if bad {
			return nil, inbox.Permanent(errors.New("no such article"))
		}
		tx, ok := inbox.TxFromContext(m.Context())
		if !ok {
			return nil, errors.New("no transaction")
		}
		if _, err := tx.ExecContext(m.Context(), `insert into oncemill.effects (note) values ($1)`, m.UUID); err != nil {
			return nil, err
		}
		return nil, s.onward.ContextPublisher().Publish("orders", message.NewMessageWithContext(m.Context(), "after "+m.UUID, nil))
	})
	m = m.Copy()
	m.SetContext(t.Context())
	if _, err := handler(m); err != nil {
		t.Errorf("message %s: %v", m.UUID, err)
	}
}

func count(t *testing.T, db *sql.DB, text string, args ...any) (n int) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), text, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return n
}

// theLetter returns the only open letter of a message.
func (s *shop) theLetter(t *testing.T, messageID string) *dlq.Letter {
	t.Helper()
	var page []*dlq.Letter
	eventually(t, "the letter of "+messageID, func() (seen bool) {
		var err error
		if page, err = s.letters.List(t.Context(), dlq.Filter{MessageID: messageID, States: []dlq.State{dlq.Dead}}); err != nil {
			t.Fatal(err)
		}
		return len(page) == 1
	})
	return page[0]
}

var grace = dlq.Act{By: "grace", Reason: "mended"}

func TestRoles_EachDoesItsJobWithTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for role, db := range map[string]*sql.DB{"producer": s.producer, "stock": s.stock, "operator": s.operator} {
		if err := oncemill.CheckMigrated(t.Context(), db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, inbox.Migrations); err != nil {
			t.Errorf("%s: %v", role, err)
		}
	}
	s.broker.refuse(true, "sick", "hopeless")
	stop := s.run(t)

	// Publish, schedule, cancel.
	s.publish(t, 0, "one", "sick", "hopeless")
	s.publish(t, time.Second, "soon")
	s.publish(t, time.Hour, "never", "later")
	err := s.shelf.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		for id, want := range map[string]bool{"never": true, "nobody": false} {
			if canceled, err := s.shelf.CancelScheduled(ctx, tx, id); err != nil || canceled != want {
				return fmt.Errorf("cancel %s: %v, %w", id, canceled, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	eventually(t, "delivery", func() bool { return len(s.broker.published("one")) == 1 && len(s.broker.published("soon")) == 1 })

	// Dead letters of the relay: one is replayed, one discarded.
	sick, hopeless := s.theLetter(t, "sick"), s.theLetter(t, "hopeless")
	s.broker.refuse(false, "sick")
	if _, err := s.letters.Replay(t.Context(), []int64{sick.ID}, grace); err != nil {
		t.Error(err)
	}
	if err := s.letters.Discard(t.Context(), hopeless.ID, grace); err != nil {
		t.Error(err)
	}
	eventually(t, "the replay", func() bool { return len(s.broker.published("sick")) == 1 })

	// Consume, once each; a dead letter of the consumer, and its replay.
	s.consume(t, s.broker.published("one")[0], false)
	s.consume(t, s.broker.published("one")[0], false)
	s.consume(t, s.broker.published("soon")[0], true)
	eventually(t, "what the consumer published", func() bool { return len(s.broker.published("after one")) == 1 })
	dead := s.theLetter(t, "soon")
	if _, err := s.letters.Replay(t.Context(), []int64{dead.ID}, grace); err != nil {
		t.Error(err)
	}
	if n, err := s.consumer.Replay(t.Context()); err != nil || n != 1 {
		t.Errorf("replayed %d, %v", n, err)
	}
	replay := s.broker.published("soon")
	s.consume(t, replay[len(replay)-1], false)
	s.consume(t, replay[len(replay)-1], false)
	if l, err := s.letters.Get(t.Context(), dead.ID); err != nil || l.State != dlq.Replayed || l.Version != 3 {
		t.Errorf("after its replay: %+v, %v", l, err)
	}
	if n := count(t, s.admin, `select count(*) from oncemill.effects`); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}

	// Purge: ids by the consumer, letters by the owner.
	if _, err := s.admin.ExecContext(t.Context(), `update oncemill.inbox set received_at = received_at - interval '1 year'; update oncemill.dead_letters set closed_at = closed_at - interval '1 year'`); err != nil {
		t.Fatal(err)
	}
	if _, err := s.consumer.Prune(t.Context()); err != nil || count(t, s.admin, `select count(*) from oncemill.inbox where not dead`) != 0 {
		t.Errorf("pruning left ids, %v", err)
	}
	owners, err := dlq.New(s.owner, dlq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := owners.Forget(t.Context()); err != nil || n != 3 {
		t.Errorf("forgot %d letters, %v", n, err)
	}
	stop()
}

// The token of a replay is known to the consumer of its letter alone. Nobody chooses it.
func TestRoles_TokensOfReplaysAreTheConsumersOwn(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	if _, err := s.admin.ExecContext(t.Context(), `
		insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint)
		select 'consumer', c, 'orders', c, 'x', 'failed', '', 'f' from unnest(array['mail', 'stock']) c`); err != nil {
		t.Fatal(err)
	}
	for _, consumer := range []string{"mail", "stock"} {
		if _, err := s.letters.Replay(t.Context(), []int64{s.theLetter(t, consumer).ID}, grace); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, s.admin, `select count(distinct token) from oncemill.dead_letters where token ~ '^[0-9a-f]{32}$'`); n != 2 {
		t.Fatalf("%d tokens", n)
	}
	if own := texts(t, s.stock, `select consumer from oncemill.dead_letters where token <> ''`); !slices.Equal(own, []string{"stock"}) {
		t.Errorf("stock reads the tokens of %v", own)
	}
	for name, db := range map[string]*sql.DB{"producer": s.producer, "operator": s.operator} {
		if _, err := db.ExecContext(t.Context(), `select token from oncemill.dead_letters`); sqlerr.State(err) != "42501" {
			t.Errorf("the %s reads tokens: %v", name, err)
		}
	}
	for name, db := range map[string]*sql.DB{"producer": s.producer, "operator": s.operator, "stock": s.stock} {
		for _, text := range []string{
			`update oncemill.dead_letters set token = 'mine'`,
			`insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint, token) values ('consumer', 'stock', '', '', '', '', '', '', 'mine')`,
			`insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint, state) values ('consumer', 'stock', '', '', '', '', '', '', 'replaying')`,
		} {
			if _, err := db.ExecContext(t.Context(), text); sqlerr.State(err) != "42501" {
				t.Errorf("%s, as %s: %v", text, name, err)
			}
		}
	}
}

// column is one of a table.
type column struct{ table, name, kind string }

func columns(t *testing.T, db *sql.DB) (all []column) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `
		select c.relname, a.attname, format_type(a.atttypid, null)
		from pg_attribute a join pg_class c on c.oid = a.attrelid
		where c.relnamespace = 'oncemill'::regnamespace and c.relkind in ('r', 'p') and c.relname <> 'effects'
			and a.attnum > 0 and not a.attisdropped
		order by 1, a.attnum`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var c column
		if err := rows.Scan(&c.table, &c.name, &c.kind); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// forgery makes values that no honest program writes.
type forgery struct{ *rand.Rand }

func (r forgery) of(kinds ...any) any { return kinds[r.IntN(len(kinds))] }

func (r forgery) value(kind string) any {
	switch kind {
	case "smallint", "integer":
		return r.of(-1, 0, 1, 31, 32, math.MaxInt16)
	case "bigint":
		return r.of(-1, 0, 1, 1<<40, int64(math.MaxInt64), int64(math.MinInt64))
	case "boolean":
		return r.IntN(2) == 0
	case "bytea":
		return r.of([]byte{}, []byte("x"), []byte("{"), make([]byte, 70_000))
	case "state":
		return r.of("dead", "held", "replaying", "replaying", "replaying", "discarding", "replayed", "discarded", "forged")
	case "jsonb":
		return r.of(`[]`, `{}`, `7`, `[{"at":"x"}]`)
	case "timestamp with time zone":
		return r.of("infinity", "-infinity", "now", "1969-01-01", "294276-01-01", "4713-01-01 BC", "9999-12-31")
	}
	raw := make([]byte, 3000)
	for i := range raw {
		raw[i] = byte(r.Uint32())
	}
	return r.of("", "x", strings.Repeat("x", 256), hex.EncodeToString(raw), "consumer", "relay", "replaying", "discarding", "held", "replayed", "discarded",
		"stock", "stock/x", "mail", "\x1b[31m\n", "orders", "m", fmt.Sprint("forged ", r.Uint64()))
}

// Rows of every table with values of every kind, by each role: whatever the database
// takes stops nobody, and of others nothing is read, changed or lost.
func TestRoles_ForgedRowsStopNobody(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if given, err := strconv.ParseUint(os.Getenv("ONCEMILL_SEED"), 10, 64); err == nil {
		seed = given
	}
	t.Logf("ONCEMILL_SEED=%d", seed)
	r := forgery{rand.New(rand.NewPCG(seed, 0))}
	s := newShop(t)
	stop := s.run(t)

	// What belongs to others: letters of a relay and of another consumer, its ids,
	// a scheduled message, and one that is parked.
	s.broker.refuse(true, "sick")
	s.publish(t, 0, "sick")
	s.publish(t, time.Hour, "later")
	s.theLetter(t, "sick")
	if _, err := s.admin.ExecContext(t.Context(), `
		insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint) select 'consumer', 'mail', 'orders', 'm' || i, 'secret', 'failed', '', 'f' from generate_series(1, 20) i;
		insert into oncemill.inbox_failures (consumer, message_id) select 'mail', 'm' || i from generate_series(1, 20) i;
		insert into oncemill.inbox_sequences (consumer, key, seq) select 'mail', 'm' || i, 1 from generate_series(1, 20) i;
		insert into oncemill.inbox_refused (consumer, topic, reason, refused, total) select 'mail', 'm' || i, 'unverified', 1, 1 from generate_series(1, 20) i;
		alter table oncemill.inbox disable trigger all;
		insert into oncemill.inbox (consumer, message_id) select 'mail', 'm' || i from generate_series(1, 20) i;
		alter table oncemill.inbox enable trigger all`); err != nil {
		t.Fatal(err)
	}
	others := func() (all []string) {
		for _, text := range []string{
			`select id || source || topic || message_id || key || payload::text || metadata::text || consumer || coalesce(row_id, 0) || reason || error || died_at from oncemill.dead_letters where consumer not like 'stock%' and id <= 21 order by id`,
			`select i::text from oncemill.inbox i where consumer = 'mail' order by message_id`,
			`select i::text from oncemill.inbox_failures i where consumer = 'mail' order by message_id`,
			`select i::text from oncemill.inbox_sequences i where consumer = 'mail' order by key`,
			`select i::text from oncemill.inbox_refused i where consumer = 'mail' order by topic`,
			`select i::text from oncemill.scheduled i where message_id = 'later'`,
			`select i::text from oncemill.migrations i order by 1`,
			`select count(*) || '' from oncemill.relay_leases`,
		} {
			all = append(all, texts(t, s.admin, text)...)
		}
		return all
	}
	before := others()

	byTable := map[string][]column{}
	for _, c := range columns(t, s.admin) {
		byTable[c.table] = append(byTable[c.table], c)
	}
	tables := slices.Sorted(func(yield func(string) bool) {
		for name := range byTable {
			if !yield(name) {
				return
			}
		}
	})
	// What the roles may write, to begin with.
	valid := map[string]map[string]any{
		"outbox":       {"lane": 1, "topic": "orders", "key": "", "payload": []byte("x"), "metadata": []byte{}},
		"scheduled":    {"lane": 1, "topic": "orders", "key": "", "payload": []byte("x"), "metadata": []byte{}, "deliver_at": "now"},
		"dead_letters": {"source": "consumer", "consumer": "stock", "topic": "orders", "payload": []byte("letter"), "reason": "failed", "error": "", "fingerprint": "f"},
		"inbox":        {"consumer": "stock"}, "inbox_failures": {"consumer": "stock"}, "inbox_sequences": {"consumer": "stock", "key": "", "seq": 1},
		"inbox_refused": {"consumer": "stock", "topic": "", "reason": "", "refused": 1, "total": 1},
	}
	may := []column{{"dead_letters", "state", "state"}, {"dead_letters", "closed_at", "timestamp with time zone"}, {"dead_letters", "acted_by", "text"}}
	roles := map[string]*sql.DB{"producer": s.producer, "stock": s.stock, "operator": s.operator}
	taken := map[string]int{}
	for i := range 1000 {
		role := r.of("producer", "stock", "operator").(string)
		table := r.of("outbox", "scheduled", "dead_letters", "dead_letters", tables[r.IntN(len(tables))]).(string)
		own := byTable[table]
		var text string
		var args []any
		if r.IntN(4) > 0 && (role != "operator" || table != "dead_letters") {
			values := maps.Clone(valid[table])
			if values == nil {
				values = map[string]any{"lane": 1}
			}
			if slices.ContainsFunc(own, func(c column) bool { return c.name == "message_id" }) {
				values["message_id"] = fmt.Sprint("forged ", i)
			}
			for range r.IntN(3) {
				c := own[r.IntN(len(own))]
				values[c.name] = r.value(c.kind)
			}
			var names, places []string
			for name, value := range values {
				args = append(args, value)
				names, places = append(names, name), append(places, fmt.Sprint("$", len(args)))
			}
			text = fmt.Sprintf(`insert into oncemill.%s (%s) values (%s)`, table, strings.Join(names, ", "), strings.Join(places, ", "))
		} else {
			changed := []column{own[r.IntN(len(own))], own[r.IntN(len(own))]}
			if table == "dead_letters" && r.IntN(2) == 0 {
				changed = may[:1+r.IntN(len(may))]
			}
			values := map[string]any{}
			for _, c := range changed {
				values[c.name] = r.value(c.kind)
			}
			var sets []string
			for name, value := range values {
				args = append(args, value)
				sets = append(sets, fmt.Sprint(name, " = $", len(args)))
			}
			// Some of them, since one that may not be changed keeps all from it.
			text = fmt.Sprintf(`update oncemill.%s set %s`, table, strings.Join(sets, ", "))
			if table == "dead_letters" {
				text += fmt.Sprintf(` where id %% 5 = %d`, r.IntN(5))
			}
		}
		_, err := roles[role].ExecContext(t.Context(), text, args...)
		switch {
		case err == nil:
			taken[role+" "+strings.Fields(text)[0]+" "+table]++
		case sqlerr.State(err) == "":
			t.Fatalf("%s: %v", text, err)
		}
	}
	t.Logf("taken: %v", taken)
	for _, some := range []string{"producer insert outbox", "producer insert scheduled", "stock insert dead_letters", "operator update dead_letters"} {
		if taken[some] == 0 {
			t.Errorf("nothing was taken of %s: the test shows nothing", some)
		}
	}
	for what := range taken {
		words := strings.Fields(what)
		role, table := words[0], words[2]
		if role == "producer" && table != "outbox" && table != "scheduled" || role == "operator" && table != "dead_letters" || strings.HasPrefix(table, "relay") || table == "parked" || table == "migrations" {
			t.Errorf("%s was taken", what)
		}
	}
	if after := others(); !slices.Equal(before, after) {
		t.Errorf("what belongs to others was\n%q\nand is\n%q", before, after)
	}
	if n := count(t, s.admin, `select count(*) from oncemill.dead_letters where (source <> 'consumer' or consumer <> 'stock' and not starts_with(consumer, 'stock/')) and payload = 'letter'`); n != 0 {
		t.Errorf("%d letters were forged in the name of others", n)
	}

	// Nobody reads or locks what is others'.
	for role, db := range roles {
		for _, table := range tables {
			mine := map[string][]string{"stock": {"inbox", "inbox_failures", "inbox_sequences", "inbox_refused", "dead_letters"}, "operator": {"dead_letters"}}[role]
			if !slices.Contains(append(mine, "migrations"), table) {
				if _, err := db.ExecContext(t.Context(), `select from oncemill.`+table); sqlerr.State(err) != "42501" {
					t.Errorf("%s reads %s: %v", role, table, err)
				}
			}
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.ExecContext(t.Context(), `lock table oncemill.`+table+` in access exclusive mode nowait`); sqlerr.State(err) != "42501" && (role != "stock" || !strings.HasPrefix(table, "inbox")) {
				t.Errorf("%s locks %s: %v", role, table, err)
			}
			if err := tx.Rollback(); err != nil {
				t.Error(err)
			}
		}
	}
	for _, table := range []string{"dead_letters", "inbox", "inbox_failures", "inbox_sequences", "inbox_refused"} {
		if n := count(t, s.stock, `select count(*) from oncemill.`+table+` where consumer not like 'stock%'`); n != 0 {
			t.Errorf("stock sees %d rows of %s of others", n, table)
		}
	}

	// Everybody goes on: the relay that runs, one that starts, the consumer, the operator.
	s.publish(t, 0, "honest 1")
	s.publish(t, time.Millisecond, "honest 2")
	goesOn := func(ids ...string) {
		t.Helper()
		for _, id := range ids {
			eventually(t, "delivery of "+id, func() bool { return len(s.broker.published(id)) == 1 })
		}
	}
	goesOn("honest 1", "honest 2")
	stop()
	if _, err := relay.RepairSequence(t.Context(), s.box); err != nil {
		t.Error(err)
	}
	stop = s.run(t)
	s.publish(t, 0, "honest 3")
	goesOn("honest 3")
	s.consume(t, s.broker.published("honest 1")[0], false)
	s.consume(t, s.broker.published("honest 2")[0], true)
	if n := count(t, s.admin, `select count(*) from oncemill.effects where note = 'honest 1'`); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
	letter := s.theLetter(t, "honest 2")
	if _, err := s.letters.List(t.Context(), dlq.Filter{Limit: 1000}); err != nil {
		t.Error(err)
	}
	if err := s.letters.Discard(t.Context(), letter.ID, grace); err != nil {
		t.Error(err)
	}
	stop()
}

func texts(t *testing.T, db *sql.DB, text string) (all []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), text)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	defer rows.Close()
	for rows.Next() {
		var one sql.NullString
		if err := rows.Scan(&one); err != nil {
			t.Fatal(err)
		}
		all = append(all, one.String)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}
