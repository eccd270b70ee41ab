package relay_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// twoWorkers starts two workers that share the lanes.
func (p place) twoWorkers(t testing.TB, f *variety, history time.Duration) {
	t.Helper()
	cfg := relay.Config{Lease: silenceLease, Retry: quickly}
	for _, name := range []string{"a", "b"} {
		start(t, p.boxOn(t, p.open(t), history), &sink{name: name, wire: f.wire, handle: f.handle}, cfg)
	}
	p.awaitShared(t)
}

// quickly tries what failed again soon, a few times.
var quickly = relay.Retry{Initial: 10 * time.Millisecond, Max: 50 * time.Millisecond, MaxAttempts: 4}

func (p place) awaitShared(t testing.TB) {
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
	if !long() {
		locks = []lock{{"outbox_history", "share", true}, {"parked", "share", true}, {"dead_letters", "share", true}}
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
			time.Sleep(2 * silenceLease) // the clock stands still
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
			until(t, "two leases, or their delivery", func() bool { return f.missing(all) == 0 || f.clock.Load() > begin+2*15 }, f.clock.Load)
			if n := f.missing(all); n > 0 && long() {
				t.Errorf("%d messages of %d are not delivered two leases later", n, len(all))
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

// Run returns although no statement has an answer.
func TestRelay_StopsWhileItsDatabaseIsSilent(t *testing.T) {
	t.Parallel()
	ends := map[string][]string{
		"everything": nil,
		"reads":      {"string_agg(int8send(f.id)"},
		"deletions":  {"delete from {{outbox}} o\nusing unnest("},
		"heartbeats": {"with alive as ("},
		"limits":     {"set local lock_timeout"},
	}
	for name, parts := range ends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t)
			proxy, db := p.behindProxy(t)
			f := newVariety(&beats{})
			made, err := relay.New(p.boxOn(t, db, outbox.NoHistory), &sink{name: "a", wire: f.wire, handle: f.handle},
				relay.Config{Lease: silenceLease, StopTimeout: time.Second, Logger: quiet})
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
			case <-time.After(patience):
				t.Error("Run does not return while the database is silent")
			}
			proxy.Resume()
			start(t, p.boxOn(t, p.open(t), outbox.NoHistory), &sink{name: "b", wire: f.wire, handle: f.handle}, relay.Config{Lease: silenceLease, Retry: quickly})
			stop()
			f.check(t, p)
		})
	}
}
