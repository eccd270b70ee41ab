package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// twoWorkers starts two workers that share the lanes.
func (p testDB) twoWorkers(t testing.TB, f *variety, history time.Duration) {
	t.Helper()
	cfg := relay.Config{Lease: silenceLease, Retry: quickly}
	for _, name := range []string{"a", "b"} {
		start(t, p.boxOn(t, p.open(t), history), &sink{name: name, wire: f.wire, handle: f.handle}, cfg)
	}
	p.awaitShared(t)
}

// quickly tries what failed again soon, a few times.
var quickly = relay.Retry{Initial: 10 * time.Millisecond, Max: 50 * time.Millisecond, MaxAttempts: 4}

func (p testDB) awaitShared(t testing.TB) {
	t.Helper()
	p.awaitShares(t, map[string]int{"a": outbox.Lanes / 2, "b": outbox.Lanes / 2})
}

// Somebody locks rows of the outbox, of every lane, while they are delivered.
func TestRelay_DeliversBesideLockedRows(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	f, box := newVariety(p.beatsOf(t, "b")), p.boxOn(t, p.db, 24*time.Hour)
	unlock := p.lockRows(t, box, f)
	p.twoWorkers(t, f, 24*time.Hour)
	stop := f.start(t, box)
	begin := f.clock.Load()
	until(t, "two leases", func() bool { return f.clock.Load() > begin+2*15 }, f.clock.Load)
	stop()
	f.await(t)
	p.awaitScheduled(t)
	eventually(t, "only what is locked is owed", func() bool { return p.owed(t) == outbox.Lanes })
	p.awaitShared(t)
	unlock()
	f.check(t, p)
}

// Somebody locks a table. What does not need it goes on, and everything when it is free.
func TestRelay_DeliversBesideALockedTable(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	type lock struct {
		table, mode string
		goesOn      bool // messages that do not fail, and are not for later, are delivered
	}
	locks := []lock{
		{"outbox", "access exclusive", false}, // it is what holds them
		{"outbox", "share", false},            // they cannot be committed
		{"outbox_history", "access exclusive", true},
		{"outbox_history", "share", true}, // as create index takes it
		{"scheduled", "access exclusive", true},
		{"scheduled", "share", true},
		{"parked", "access exclusive", true},
		{"parked", "share", true},
		{"dead_letters", "access exclusive", true},
		{"dead_letters", "share", true},
		{"relay_leases", "access exclusive", false}, // no lease is renewed
		{"relay_leases", "share", false},
		{"relay_workers", "access exclusive", false},
		{"relay_workers", "share", false},
		{"migrations", "access exclusive", true}, // as long as no connection is lost
	}
	name := func(l lock) string { return l.table + " in " + l.mode + " mode" }
	together(t, 3, locks, name, func(t *testing.T, l lock) {
		p := onPostgres(t)
		f, box := newVariety(p.beatsOf(t, "b")), p.boxOn(t, p.db, 24*time.Hour)
		p.twoWorkers(t, f, 24*time.Hour)
		stop := f.start(t, box)
		eventually(t, "messages arrive", func() bool { return f.wire.count() > 100 })
		if !l.goesOn {
			unlock := p.lock(t, `lock table {{`+l.table+`}} in `+l.mode+` mode`)
			testserver.Pause(t.Context(), 2*silenceLease) // the clock stands still
			unlock()
		} else {
			stop()
			unlock := p.lock(t, `lock table {{`+l.table+`}} in `+l.mode+` mode`)
			var all []*message.Message
			for i := range 20 {
				more := spread(40, 1)
				for _, m := range more {
					m.UUID = fmt.Sprint("beside", i, "/", m.UUID)
				}
				commit(t, box, more...)
				all = append(all, more...)
				begin := f.clock.Load()
				until(t, "a heartbeat", func() bool { return f.clock.Load() > begin+1 }, f.clock.Load)
			}
			f.add(all)
			begin := f.clock.Load()
			until(t, "they are delivered beside the lock", func() bool { return f.missing(all) == 0 }, func() int64 { return int64(f.wire.count()) })
			if took := f.clock.Load() - begin; took > 2*15 {
				t.Errorf("their delivery took %.1f leases", leases(took))
			}
			unlock()
			stop = f.start(t, box)
		}
		begin := f.clock.Load()
		until(t, "a lease", func() bool { return f.clock.Load() > begin+15 }, f.clock.Load)
		stop()
		f.check(t, p)
		p.awaitShared(t)
	})
}

// The administrator's limits are no longer than what the library needs.
func TestRelay_WorksUnderTheAdministratorsLimits(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	limited := []string{"statement_timeout=1s", "lock_timeout=1s", "idle_in_transaction_session_timeout=1s"}
	f := newVariety(p.beatsOf(t, "b"))
	cfg := relay.Config{Lease: silenceLease, Retry: quickly}
	for _, name := range []string{"a", "b"} {
		start(t, p.boxOn(t, p.open(t, limited...), 24*time.Hour), &sink{name: name, wire: f.wire, handle: f.handle}, cfg)
	}
	p.awaitShared(t)
	stop := f.start(t, p.boxOn(t, p.open(t, limited...), 24*time.Hour))
	begin := f.clock.Load()
	until(t, "two leases", func() bool { return f.clock.Load() > begin+2*15 }, f.clock.Load)
	stop()
	f.check(t, p)
	if n := p.count(t, `select count(*) from {{outbox_history}}`); n != len(f.expected) {
		t.Errorf("%d rows of the history, %d messages were delivered", n, len(f.expected))
	}
	p.awaitShared(t)
}

const (
	stopTimeout = time.Second

	// stopsWithin is what Run promises, and what a busy machine may need until it runs
	// the goroutines that keep the promise. What hangs in these tests does so for longer.
	stopsWithin = stopTimeout + time.Second + 10*time.Second
)

// Run returns although no statement has an answer.
func TestRelay_StopsWhileItsDatabaseIsSilent(t *testing.T) {
	t.Parallel()
	ends := map[string][]string{
		"everything": nil,
		"reads":      {"_read\"("},
		"deletions":  {"delete from {{outbox}} o\nusing unnest("},
		"heartbeats": {"with alive as ("},
		"limits":     {"set local lock_timeout"},
	}
	if !testserver.Long() {
		delete(ends, "reads")
		delete(ends, "limits")
	}
	for name, parts := range ends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t)
			proxy, db := p.behindProxy(t)
			f := newVariety(&beats{})
			made, err := relay.New(p.boxOn(t, db, outbox.NoHistory), &sink{name: "a", wire: f.wire, handle: f.handle},
				relay.Config{Lease: 4 * stopsWithin, StopTimeout: stopTimeout, Logger: quiet}) // a call may take a third of it
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- made.Run(ctx) }()
			stop := f.start(t, p.boxOn(t, p.db, outbox.NoHistory))
			eventually(t, "messages arrive", func() bool { return f.wire.count() > 100 })
			if silenced := (silencing{parts: parts}); parts == nil {
				proxy.SilenceAll()
			} else {
				proxy.Silence(silenced.matcher(p), math.MaxInt)
			}
			eventually(t, "a connection is silenced", func() bool { return proxy.Silenced() > 0 })
			cancel()
			select {
			case err := <-ended:
				if err != nil && !errors.Is(err, relay.ErrStillRunning) {
					t.Errorf("Run: %v", err)
				}
			case <-time.After(stopsWithin):
				t.Errorf("Run has not returned %v after its end", stopsWithin)
			}
			proxy.Resume()
			p.execute(t, `update {{relay_leases}} set lease_until = clock_timestamp() - interval '1 second'`)
			start(t, p.boxOn(t, p.open(t), outbox.NoHistory), &sink{name: "b", wire: f.wire, handle: f.handle}, relay.Config{Lease: silenceLease, Retry: quickly})
			stop()
			f.check(t, p)
		})
	}
}

// stubborn is a sink that hangs in Run or in Publish, and heeds no context.
type stubborn struct {
	run, publish bool
	asked        chan struct{} // a message was handed to it
	until        chan struct{}
}

func (s *stubborn) Run(ctx context.Context) error {
	<-ctx.Done()
	if s.run {
		<-s.until
	}
	return nil
}

func (s *stubborn) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	select {
	case s.asked <- struct{}{}:
	default:
	}
	if s.publish {
		<-s.until
	}
	for _, m := range msgs {
		done(m, nil)
	}
}

// Run returns although its sink does not, and says that it left something behind.
func TestRelay_LeavesASinkBehindThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]*stubborn{"Run": {run: true}, "Publish": {publish: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := onSQLite(t)
			s.asked, s.until = make(chan struct{}, 1), make(chan struct{})
			r, err := relay.New(p.box(t), s, relay.Config{StopTimeout: stopTimeout, Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- r.Run(ctx) }()
			defer close(s.until)
			commit(t, p.box(t), unkeyed(1)...)
			<-s.asked
			cancel()
			select {
			case err := <-ended:
				if !errors.Is(err, relay.ErrStillRunning) {
					t.Errorf("Run: %v", err)
				}
			case <-time.After(stopsWithin):
				t.Errorf("Run has not returned %v after its end", stopsWithin)
			}
		})
	}
}

// Somebody locks very many rows of a lane: what is committed since is delivered.
func TestRelay_DeliversBesideManyLockedRowsOfALane(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, w := p.boxOn(t, p.db, outbox.NoHistory), &wire{}
	locked := ofLane("locked", 3, 300, 10)
	commit(t, box, locked...)
	p.lock(t, `select from {{outbox}} for update`)
	start(t, p.boxOn(t, p.open(t), outbox.NoHistory), &sink{name: "a", wire: w}, relay.Config{Lease: silenceLease, Retry: quickly})
	w.await(t, len(locked))
	more := ofLane("more", 3, 5, 10)
	commit(t, box, more...)
	w.await(t, len(locked)+len(more))
}

// Somebody locks a message that waits: those of other keys are delivered, though each
// key waits for the deletion of its first, which failed once.
func TestRelay_DeliversBesideALockedMessageThatWaits(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, w := p.boxOn(t, p.db, outbox.NoHistory), &wire{}
	var mended atomic.Bool
	tries := sync.Map{}
	handle := func(_ context.Context, m *relay.Message) error {
		if _, before := tries.LoadOrStore(m.MessageID, true); !before && strings.HasSuffix(m.MessageID, "/0") || m.Key == "victim" && !mended.Load() {
			return relay.Refused(errors.New("bad"))
		}
		return nil
	}
	cfg := relay.Config{Lease: silenceLease, Retry: relay.Retry{Initial: 100 * time.Millisecond, Max: 200 * time.Millisecond, MaxAttempts: 1000}}
	start(t, p.boxOn(t, p.open(t), outbox.NoHistory), &sink{name: "a", wire: w, handle: handle}, cfg)
	commit(t, box, keyed("victim", 0, 1)...)
	eventually(t, "it is parked", func() bool { return p.count(t, `select count(*) from {{parked}}`) == 1 })
	unlock := p.lock(t, `select from {{parked}} where key = 'victim' for update`)
	mended.Store(true)
	var all []*message.Message
	for k := range 10 {
		all = append(all, keyed(fmt.Sprint("key", k), 0, testserver.Rounds(30, 100))...)
	}
	commit(t, box, all...)
	until(t, "the other keys arrive", func() bool { return w.distinct() >= len(all) }, func() int64 { return int64(w.distinct()) })
	unlock()
	p.awaitNothingOwed(t)
}

// A row of the outbox cannot be deleted: the others are.
func TestRelay_DeletesWhatCanBeDeleted(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, w := p.boxOn(t, p.db, outbox.NoHistory), &wire{}
	p.execute(t, `create function {{schema}}.refuse() returns trigger language plpgsql as $$ begin if old.message_id = 'kept/0' then raise exception 'not this one'; end if; return old; end $$`)
	p.execute(t, `create trigger refuse before delete on {{outbox}} for each row execute function {{schema}}.refuse()`)
	start(t, p.boxOn(t, p.open(t), outbox.NoHistory), &sink{name: "a", wire: w}, relay.Config{Lease: silenceLease, Retry: quickly})
	commit(t, box, append(keyed("kept", 0, 1), spread(50, 1)...)...)
	w.await(t, 51)
	commit(t, box, keyed("more", 0, 20)...)
	w.await(t, 71)
	eventually(t, "only that one is owed", func() bool { return p.owed(t) == 1 })
}

// Very many connections of the pool lead nowhere, for ever. New ones work.
func TestRelay_GoesOnWhenManyConnectionsAreDead(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	proxy, db := p.behindProxy(t)
	idle := testserver.Rounds(15, 40)
	db.SetMaxIdleConns(2 * idle)
	var conns []*sql.Conn
	for range idle {
		c, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	for _, c := range conns {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	w, box := &wire{}, p.boxOn(t, p.db, outbox.NoHistory)
	start(t, p.boxOn(t, db, outbox.NoHistory), &sink{name: "a", wire: w}, relay.Config{Lease: silenceLease, Retry: quickly})
	commit(t, box, keyed("k", 0, 10)...)
	w.await(t, 10)
	proxy.Silence(func(string) bool { return true }, db.Stats().OpenConnections)
	commit(t, box, keyed("k", 10, 10)...)
	until(t, "they arrive", func() bool { return w.distinct() >= 20 }, func() int64 { return int64(proxy.Silenced()) })
	proxy.Resume()
}
