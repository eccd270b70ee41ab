package relay_test

import (
	"bytes"
	"context"
	"database/sql"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const (
	silenceLease = 3 * time.Second
	beatEvery    = silenceLease / 15
)

// beats is a clock that ticks with each heartbeat of a worker, so that it runs slowly
// where the machine is busy.
type beats struct{ atomic.Int64 }

// beatsOf starts a clock that goes by a worker's heartbeats until the test ends.
func (p testDB) beatsOf(t testing.TB, worker string) *beats {
	t.Helper()
	clock := &beats{}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var group sync.WaitGroup
	group.Go(func() {
		query := database.Of(p.cfg).Expand(`select coalesce(max((extract(epoch from seen_until) * 1000000)::bigint), 0) from {{relay_workers}} where name = $1`)
		for last := 0; sleep.For(ctx, beatEvery/4); {
			seen, err := countIn(ctx, p.db, query, worker)
			if err == nil && seen-last >= int(beatEvery.Microseconds())*9/10 {
				last = seen
				clock.Add(1)
			}
		}
	})
	t.Cleanup(func() { cancel(); group.Wait() })
	return clock
}

// leases returns a number of heartbeats as a number of leases.
func leases(beats int64) float64 { return float64(beats) * float64(beatEvery) / float64(silenceLease) }

// until waits for a condition while progress moves.
var until = testserver.EventuallyMoving[int64]

// still is a progress that does not move.
func still() int64 { return 0 }

// phase is when a case's connections are silenced.
type phase uint8

const (
	working   phase = iota // both workers share the lanes
	joining                // the worker behind the proxy has all lanes, and another one comes
	starting               // another worker has all lanes, and the one behind the proxy comes
	following              // the one behind the proxy comes after one that has died, and then another one
)

// silencing is a kind of statement that has no answer.
type silencing struct {
	kind    string
	parts   []string // that tell its text; nil: everything, from new connections too
	when    phase
	prepare string // executed before the worker behind the proxy starts
	config  func(*relay.Config, *variety)
	history time.Duration
	locked  bool // rows of the outbox, one of each lane
	upkeep  bool // the other worker is to take the upkeep
	long    bool // not in CI
}

func once(cfg *relay.Config, f *variety) { cfg.Retry.MaxAttempts, f.flaky = 1, 0 }

func durably(cfg *relay.Config, _ *variety) { cfg.RequireDurable = true }

func hold(cfg *relay.Config, f *variety) { cfg.Retry.Exhausted, f.held = relay.ExhaustedHoldKey, true }

func flood(cfg *relay.Config, f *variety) {
	cfg.Retry.MaxAttempts, f.flood, cfg.Batch = 12, true, 400
}

// cram is a flood, of lanes with little memory.
func cram(cfg *relay.Config, f *variety) {
	flood(cfg, f)
	cfg.Batch = 8
}

// Where workers have died three times a lane goes one message at a time, and one lane
// after the other. How long that takes for all 32 is a matter of the machine, so it is
// some of them.
const someIsolated = `update {{relay_leases}} set crashes = 4 where lane % 4 = 0`

func huge(_ *relay.Config, f *variety) { f.huge = true }

var silences = []silencing{
	{kind: "everything"},
	{kind: "begin", parts: []string{"begin"}},
	{kind: "limits", parts: []string{"set local lock_timeout"}, long: true},
	{kind: "commit", parts: []string{"commit"}},
	{kind: "check", parts: []string{"pg_is_in_recovery()"}, when: starting, long: true},
	{kind: "migrations", parts: []string{"{{migrations}}"}, when: starting, long: true},

	{kind: "read", parts: []string{"_read\"("}},
	{kind: "look ahead", parts: []string{"with newest as materialized ("}, config: cram, long: true},
	{kind: "flush", parts: []string{"update {{relay_workers}} set seen_until = seen_until where"}, config: durably, long: true},
	{kind: "read of large rows", parts: []string{"select m.lane, int8send(m.id)"}, long: true},
	{kind: "piece of a large message", parts: []string{"substring(o.payload from"}, config: huge, long: true},
	{kind: "removal by ctid", parts: []string{"o.ctid = any"}, long: true},
	{kind: "removal by identity", parts: []string{"delete from {{outbox}} o\nusing unnest("}},
	{kind: "move by ctid", parts: []string{"o.ctid = any", "insert into {{outbox_history}}"}, history: 24 * time.Hour, long: true},
	{kind: "move by identity", parts: []string{"delete from {{outbox}} o\nusing unnest(", "insert into {{outbox_history}}"}, history: 24 * time.Hour, long: true},
	{kind: "removal of what is free", parts: []string{"for update of o skip locked"}, locked: true, long: true},

	{kind: "heartbeat", parts: []string{"with alive as ("}},
	{kind: "census", parts: []string{"select -2, owner"}, long: true},
	{kind: "take", parts: []string{"crashes = l.crashes + case"}, when: starting},
	{kind: "release", parts: []string{"set owner = '', suspect = null"}, when: joining},

	{kind: "retrying keys", parts: []string{"select p.lane, p.key\n"}, when: starting, long: true},
	{kind: "topics that are due", parts: []string{"with recursive t (lane, topic, next_at, nth)"}},
	{kind: "rows that are due", parts: []string{"with known as materialized (", "{{parked}}"}, long: true},
	{kind: "piece of a retrying message", parts: []string{"substring(p.payload from"}, config: huge, long: true},
	{kind: "retry", parts: []string{"delete from {{outbox}} o", "kind = 0"}},
	{kind: "dead-letter at once", parts: []string{"delete from {{outbox}} o", "insert into {{dead_letters}}", "'dead', false"}, config: once, long: true},
	{kind: "another attempt", parts: []string{"parked_at = case when c.attempt = 1"}},
	{kind: "dead-letter", parts: []string{"delete from {{parked}} p", "insert into {{dead_letters}}"}},
	{kind: "hold", parts: []string{"next_at = null, held = true"}, config: hold, long: true},
	{kind: "remove", parts: []string{"with gone as (\n\tdelete from {{parked}} p"}},
	{kind: "close letters", parts: []string{"confirmed by the broker after it was given up"}, long: true},
	{kind: "promote", parts: []string{"with heads as (", "left join lateral ("}, long: true},
	{kind: "follow", parts: []string{"(select count(*) from f), (select count(*) from d)"}, config: flood, long: true},
	{kind: "commands", parts: []string{"d.state in ('replaying', 'discarding')"}},
	{kind: "alone", parts: []string{"set suspect = nullif($4"}, when: starting, prepare: someIsolated, long: true},
	{kind: "find", parts: []string{"where o.lane = $1 and o.id = $2"}, when: following, prepare: `update {{relay_leases}} set suspect = 1, owner = 'dead'`, long: true},
	{kind: "clear crashes", parts: []string{"set crashes = 0, suspect = null"}, when: starting, prepare: `update {{relay_leases}} set crashes = 1`, long: true},

	{kind: "next scheduled", parts: []string{"extract(epoch from s.deliver_at - clock_timestamp())"}, upkeep: true},
	{kind: "move of scheduled", parts: []string{"with free as materialized (", "{{scheduled}}"}, upkeep: true, long: true},
	{kind: "guard", parts: []string{"for key share) held"}, upkeep: true},
	{kind: "ring", parts: []string{"pg_stat_get_tuples_fetched"}},
	{kind: "days of the history", parts: []string{"right(c.relname, 8)"}, long: true},
	{kind: "room in the history", parts: []string{"right(c.relname, 8)"}, when: starting, long: true},
	{kind: "holders", parts: []string{"a.backend_xmin"}, long: true},
	{kind: "retention of dead letters", parts: []string{"delete from {{dead_letters}}"}, long: true},
}

// One worker's connections fall silent at each kind of statement that it makes, while
// another worker is healthy: every message is delivered within two leases, and the
// first one has lanes again soon after.
func TestRelay_DeliversWhateverStatementIsSilenced(t *testing.T) {
	t.Parallel()
	// CI sees that everything is delivered, for some kinds; how soon is for a quiet
	// machine, with ONCEMILL_LONG.
	brief := []string{"another attempt", "guard"}
	kinds := slices.DeleteFunc(slices.Clone(silences), func(s silencing) bool { return !testserver.Long() && !slices.Contains(brief, s.kind) })
	together(t, 3, kinds, func(s silencing) string { return s.kind }, func(t *testing.T, s silencing) { s.run(t) })
}

// together runs a test of each of a list, some at a time: they wait most of the time.
func together[T any](t *testing.T, most int, list []T, name func(T) string, test func(t *testing.T, one T)) {
	var group sync.WaitGroup
	slots := make(chan struct{}, most)
	for _, one := range list {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			t.Run(name(one), func(t *testing.T) { test(t, one) })
		})
	}
	group.Wait()
}

func (s silencing) matcher(p testDB) func(string) bool {
	parts := make([]string, len(s.parts))
	for i, part := range s.parts {
		parts[i] = strings.ToLower(database.Of(p.cfg).Expand(part))
	}
	return func(statement string) bool {
		statement = strings.ToLower(statement)
		for _, part := range parts {
			if !strings.Contains(statement, part) {
				return false
			}
		}
		if s.kind == "begin" || s.kind == "commit" {
			return strings.HasPrefix(statement, s.kind)
		}
		return true
	}
}

func (s silencing) run(t *testing.T) {
	p := onPostgres(t)
	proxy, behind := p.behindProxy(t)
	history := s.history
	if history == 0 {
		history = outbox.NoHistory
	}
	clock := p.beatsOf(t, "b")
	f := newVariety(clock)
	cfg := relay.Config{Lease: silenceLease, Retry: quickly}
	if s.config != nil {
		s.config(&cfg, f)
	}
	producer := p.boxOn(t, p.db, history)
	boxes := map[string]*outbox.Outbox{"a": p.boxOn(t, behind, history), "b": p.boxOn(t, p.open(t), history)}
	log := &bytes.Buffer{}
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	t.Cleanup(func() { // after the workers
		if t.Failed() {
			t.Logf("%s: the workers' log:\n%s", s.kind, tail(log.String(), 6000))
		}
	})
	begin := func(name string) {
		t.Helper()
		start(t, boxes[name], &sink{name: name, wire: f.wire, handle: f.handle}, cfg)
	}
	both := func() bool {
		shares := p.shares(t)
		return shares["a"] == outbox.Lanes/2 && shares["b"] == outbox.Lanes/2
	}
	silenceIt := func() {
		if s.parts == nil {
			proxy.SilenceAll()
			return
		}
		proxy.Silence(s.matcher(p), math.MaxInt)
	}
	unlock := func() {}
	if s.locked {
		unlock = p.lockRows(t, producer, f)
	}
	switch s.when {
	case working:
		begin("a")
		until(t, "the upkeep is a's", func() bool { return p.tends(t, "a") }, still)
		begin("b")
		until(t, "both workers have lanes", both, still)
	case joining:
		begin("a")
		p.awaitShares(t, map[string]int{"a": outbox.Lanes})
	case starting:
		begin("b")
		p.awaitShares(t, map[string]int{"b": outbox.Lanes})
		if s.prepare != "" {
			p.execute(t, s.prepare)
		}
	case following:
		p.execute(t, s.prepare)
		silenceIt()
		begin("a")
		until(t, "a connection is silenced", func() bool { return proxy.Silenced() > 0 }, still)
		begin("b")
	}
	stop := f.start(t, producer)
	until(t, "messages arrive", func() bool { return f.wire.count() > 100 }, still)
	if s.when != following {
		silenceIt()
	}
	switch s.when {
	case joining:
		begin("b")
	case starting:
		begin("a")
	}
	until(t, "a connection is silenced", func() bool {
		if s.upkeep && p.tends(t, "b") { // a stood still meanwhile: somebody takes it from b
			p.execute(t, `update {{relay_leases}} set lease_until = clock_timestamp() where lane = -1`)
		}
		return proxy.Silenced() > 0
	}, still)

	silent := clock.Load()
	const lease = int64(silenceLease / beatEvery)
	until(t, "the silence lasts three leases", func() bool { return clock.Load() > silent+3*lease }, clock.Load)
	gap, which := f.longest(silent, nil)
	t.Logf("%s: %d connections silenced; the longest delay was %.1f leases, of %s; lanes %v", s.kind, proxy.Silenced(), leases(gap), which, p.shares(t))
	if testserver.Long() && gap > 2*lease+lease/2 { // two leases, and some time for a busy machine to do it
		t.Errorf("message %s took %.1f leases", which, leases(gap))
	}

	if s.upkeep && !p.tends(t, "b") {
		t.Errorf("three leases later the upkeep is not b's")
	}
	before, ended := f.wire.by()["a"], clock.Load()
	proxy.Resume()
	until(t, "the worker has lanes again and delivers", func() bool { return both() && f.wire.by()["a"] > before }, clock.Load)
	back := clock.Load() - ended
	t.Logf("%s: back after %v of heartbeats", s.kind, time.Duration(back)*beatEvery)
	if testserver.Long() && back > int64(10*time.Second/beatEvery) {
		t.Errorf("the worker was back after %v", time.Duration(back)*beatEvery)
	}
	stop()
	unlock()
	f.check(t, p)
}

// tends reports whether a worker has the lease of the upkeep.
func (p testDB) tends(t testing.TB, worker string) bool {
	t.Helper()
	return p.count(t, `select count(*) from {{relay_leases}} l join {{relay_workers}} w on w.owner = l.owner where l.lane = -1 and w.name = $1`, worker) == 1
}

// lockRows commits a message of each lane and locks them all.
func (p testDB) lockRows(t testing.TB, box *outbox.Outbox, f *variety) (unlock func()) {
	t.Helper()
	for lane := range outbox.Lanes {
		msgs := ofLane("locked", lane, 1, 10)
		commit(t, box, msgs...)
		f.expected = append(f.expected, msgs...)
	}
	return p.lock(t, `select from {{outbox}} for update`)
}

// lock executes a statement in a transaction that lasts until unlock is called.
func (p testDB) lock(t testing.TB, statement string) (unlock func()) {
	t.Helper()
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	unlock = sync.OnceFunc(func() { _ = tx.Rollback() })
	t.Cleanup(unlock)
	if _, err := tx.ExecContext(t.Context(), database.Of(p.cfg).Expand(statement)); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
	return unlock
}

// behindProxy returns one more pool on the database, behind a proxy.
func (p testDB) behindProxy(t testing.TB) (*testserver.PostgresProxy, *sql.DB) {
	t.Helper()
	proxy, dsn := testserver.NewPostgresProxy(t, p.dsn)
	db, err := sql.Open(p.driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() }) // connections may have been cut
	return proxy, db
}
