package relay_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// stream commits messages until it is stopped, and returns them.
func stream(t testing.TB, box *outbox.Outbox) (stop func() []*message.Message) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	var all []*message.Message
	group.Go(func() {
		// So many keys that no worker with a quarter of the lanes has none of them.
		keys, pause := 40, testserver.Rounds(80*time.Millisecond, 10*time.Millisecond)
		if box.Config().Database.Dialect == oncemill.SQLite {
			keys, pause = 5, 100*time.Millisecond // one writer at a time
		}
		for i := 0; ctx.Err() == nil; i++ {
			var msgs []*message.Message
			for k := range keys {
				msgs = append(msgs, keyed(fmt.Sprint("key", k), i, 1)...)
			}
			commit(t, box, msgs...)
			all = append(all, msgs...)
			testserver.Pause(ctx, pause)
		}
	})
	t.Cleanup(func() { cancel(); group.Wait() })
	return func() []*message.Message {
		cancel()
		group.Wait()
		return all
	}
}

func TestRelay_RepeatsNothingOverCleanStops(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		stop := stream(t, box)
		inFlight := 0
		for i := range testserver.Rounds(3, 5) {
			var open atomic.Int64
			s := &sink{name: fmt.Sprint("run", i), wire: w}
			s.handle = func(ctx context.Context, m *relay.Message) error {
				open.Add(1)
				defer open.Add(-1)
				return slow(20*time.Millisecond)(ctx, m)
			}
			before := w.count()
			r := start(t, box, s, p.unhurried())
			w.await(t, before+20)
			eventually(t, "something in flight", func() bool { return open.Load() > 0 })
			if open.Load() > 0 {
				inFlight++
			}
			r.stop()
			if n := p.count(t, `select count(*) from {{relay_leases}} where owner <> ''`); n != 0 {
				t.Errorf("%d leases are not given back", n)
			}
			if n := p.count(t, `select count(*) from {{relay_workers}}`); n != 0 {
				t.Errorf("%d workers are not signed off", n)
			}
		}
		if inFlight == 0 {
			t.Error("nothing was in flight at any stop: the run says nothing")
		}
		all := stop()
		start(t, box, &sink{name: "last", wire: w}, p.unhurried())
		p.awaitNothingOwed(t)
		w.check(t, all, 0)
	})
}

func TestRelay_SharesLanesWithoutRepeats(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		stop := stream(t, box)
		var workers []running
		expected := []int{32, 16, 0, 8} // lanes of each; 0: the next one starts at once
		if !p.postgres() {
			expected = []int{32, 16}
		}
		for number, share := range expected {
			name := fmt.Sprint("worker", number)
			workers = append(workers, start(t, box, &sink{name: name, wire: w, handle: slow(5 * time.Millisecond)}, p.unhurried()))
			if share == 0 {
				continue
			}
			want := map[string]int{}
			for i := range number + 1 {
				want[fmt.Sprint("worker", i)] = share
			}
			p.awaitShares(t, want)
		}
		last := len(workers) - 1
		for i := range workers { // before any is stopped: the stream may be slower than the division
			eventually(t, fmt.Sprintf("worker%d to send something", i), func() bool { return w.by()[fmt.Sprint("worker", i)] > 0 })
		}
		if last == 3 {
			workers[1].stop()
			workers[2].stop()
			p.awaitShares(t, map[string]int{"worker0": 16, "worker3": 16})
		}
		// A fair division is left alone.
		epochs := p.count(t, `select sum(epoch) from {{relay_leases}}`)
		before := w.count()
		w.await(t, before+100)
		if n := p.count(t, `select sum(epoch) from {{relay_leases}}`); n != epochs {
			t.Errorf("lanes changed hands %d times although the shares are fair", n-epochs)
		}
		workers[0].stop()
		p.awaitShares(t, map[string]int{fmt.Sprint("worker", last): 32})
		all := stop()
		p.awaitNothingOwed(t)
		w.check(t, all, 0)
		for i, r := range workers {
			if n := r.counter(t, "oncemill.relay.takeovers"); n > 0 {
				t.Errorf("worker%d counts %d takeovers", i, n)
			}
		}
	})
}

func TestRelay_LeavesLanesToAWorkerThatReachesItsBroker(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		stop := stream(t, box)
		a, b := &sink{name: "a", wire: w}, &sink{name: "b", wire: w}
		start(t, box, a, p.unhurried())
		start(t, box, b, p.unhurried())
		p.awaitShares(t, map[string]int{"a": 16, "b": 16})
		a.away.Store(true)
		p.awaitShares(t, map[string]int{"a": 0, "b": 32})
		b.away.Store(true) // a worker that is no worse placed than the others works on
		before := w.count()
		w.await(t, before+100)
		a.away.Store(false)
		b.away.Store(false)
		p.awaitShares(t, map[string]int{"a": 16, "b": 16})
		all := stop()
		p.awaitNothingOwed(t)
		w.check(t, all, 0)
	})
}

// hang never answers and does not heed its deadline, for as long as the test
// wants it to.
func hang(until <-chan struct{}) func(context.Context, *relay.Message) error {
	return func(context.Context, *relay.Message) error {
		<-until
		return relay.Unavailable(context.DeadlineExceeded)
	}
}

func TestRelay_LosesTheLanesOfASinkThatHangs(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		release := make(chan struct{})
		end := sync.OnceFunc(func() { close(release) })
		hung := start(t, box, &sink{name: "hung", wire: w, handle: hang(release)}, short)
		t.Cleanup(end) // before the relay is stopped
		p.awaitShares(t, map[string]int{"hung": 32})
		msgs := spread(100, 3)
		commit(t, box, msgs...)

		well := start(t, box, &sink{name: "well", wire: w}, short)
		p.awaitNothingOwed(t)
		if n := well.counter(t, "oncemill.relay.takeovers"); n == 0 {
			t.Error("no takeover: the lanes were given away, or never taken")
		}
		// A worker whose sink hangs gets nothing more to hang on.
		p.awaitShares(t, map[string]int{"hung": 0, "well": 32})
		more := spread(100, 1)
		for _, m := range more {
			m.UUID += "/more"
		}
		commit(t, box, more...)
		p.awaitNothingOwed(t)
		w.check(t, append(msgs, more...), 0)
		if n := w.by()["hung"]; n != 0 {
			t.Errorf("the hung sink sent %d", n)
		}
		eventually(t, "the loss is counted", func() bool { return hung.counter(t, "oncemill.relay.lost_lanes") > 0 })
		end()
		p.awaitShares(t, map[string]int{"hung": 16, "well": 16})
	})
}

func TestRelay_StopsWithinItsTimeoutAlthoughTheSinkOwesOutcomes(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		var asked atomic.Int64
		mute := &muteSink{asked: &asked}
		cfg := short
		cfg.StopTimeout = 200 * time.Millisecond
		r := start(t, box, mute, cfg)
		msgs := spread(10, 2)
		commit(t, box, msgs...)
		eventually(t, "messages in flight", func() bool { return asked.Load() >= 10 })
		r.stop()
		if n := p.count(t, `select count(*) from {{relay_leases}} where owner <> ''`); n != 0 {
			t.Errorf("%d leases are not given back", n)
		}
		// What was not answered is owed still.
		if n := p.owed(t); n != len(msgs) {
			t.Errorf("%d rows owed, want %d", n, len(msgs))
		}
		next := start(t, box, &sink{name: "next", wire: w}, short)
		p.awaitNothingOwed(t)
		w.check(t, msgs, 0)
		if n := next.counter(t, "oncemill.relay.takeovers"); n > 0 {
			t.Errorf("%d takeovers of lanes that were given back", n)
		}
	})
}

// muteSink never reports an outcome.
type muteSink struct{ asked *atomic.Int64 }

func (s *muteSink) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (s *muteSink) Publish(_ context.Context, msgs []*relay.Message, _ func(*relay.Message, error)) {
	s.asked.Add(int64(len(msgs)))
}

func TestRelay_WaitsForWhatIsInFlightBeforeItStops(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		var asked atomic.Int64
		answer := make(chan struct{})
		s := &sink{name: "w", wire: w, handle: func(context.Context, *relay.Message) error {
			asked.Add(1)
			<-answer
			return nil
		}}
		cfg := relay.Config{Lease: 30 * time.Second, StopTimeout: maxWait}
		r := start(t, box, s, cfg)
		commit(t, box, spread(10, 2)...)
		eventually(t, "messages in flight", func() bool { return asked.Load() == 10 })
		stopped := make(chan struct{})
		go func() { defer close(stopped); r.stop() }()
		eventually(t, "the worker says that it stops", func() bool {
			return p.count(t, `select count(*) from {{relay_workers}} where stopping`) == 1
		})
		close(answer)
		<-stopped
		// Each key's first message was in flight, its second one was not begun.
		if n := w.count(); n != 10 {
			t.Errorf("%d published, want the 10 that were in flight", n)
		}
		if n := p.owed(t); n != 10 {
			t.Errorf("%d rows owed, want the 10 that were not begun", n)
		}
	})
}

// A database may make every transaction REPEATABLE READ or SERIALIZABLE unless
// it says otherwise.
func TestRelay_WorksUnderAnyDefaultIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t)
			box, w := p.boxOn(t, p.open(t, "default_transaction_isolation="+level), 24*time.Hour), &wire{}
			stop := stream(t, box)
			a := start(t, box, &sink{name: "a", wire: w, handle: slow(time.Millisecond)}, p.unhurried())
			start(t, box, &sink{name: "b", wire: w, handle: slow(time.Millisecond)}, p.unhurried())
			p.awaitShares(t, map[string]int{"a": 16, "b": 16})
			eventually(t, "the upkeep", func() bool { return p.count(t, `select count(*) from {{outbox_history}}`) > 100 })
			a.stop()
			p.awaitShares(t, map[string]int{"b": 32})
			all := stop()
			p.awaitNothingOwed(t)
			w.check(t, all, 0)
		})
	}
}

// A worker with nothing to do extends its leases less often, but before they expire.
func TestRelay_KeepsItsLeasesAtRest(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		cfg := p.unhurried()
		cfg.PollMax = 50 * time.Millisecond
		start(t, p.box(t), &sink{name: "w", wire: &wire{}}, cfg)
		now := `clock_timestamp()`
		if !p.postgres() {
			now = `unixepoch('subsec') * 1000000`
		}
		valid := func() int { return p.count(t, `select count(*) from {{relay_leases}} where lease_until > `+now) }
		const all = outbox.Lanes + 1 // with that of the upkeep
		eventually(t, "it holds all", func() bool { return valid() == all })
		for begin := time.Now(); time.Since(begin) < 3*cfg.Lease/2; testserver.Pause(t.Context(), cfg.Lease/6) {
			if n := valid(); n != all {
				t.Fatalf("%d of %d leases are valid after %v", n, all, time.Since(begin))
			}
		}
	})
}
