package relay

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// lateLeases is the database of a worker that is alone. It does at once what it is
// asked, and answers late.
type lateLeases struct {
	relaystore.Leases
	late   time.Duration
	locked int // a lane that heartbeats do not extend
	taken  bool
	asked  time.Time // when the last call came that takes or extends leases
}

// leaser returns the leaser of the worker, whose loop does nothing else until stop.
func (s *lateLeases) leaser(term time.Duration) (l *leaser, stop func()) {
	w := &worker{
		owner: "me", cfg: Config{Lease: term}, leases: s, health: newHealth(term), bounds: bounded.New(maxAbandoned),
		log: slog.New(slog.DiscardHandler), calls: make(chan func(*engine, time.Time)),
	}
	e := newEngine(limits{})
	go func() {
		for call := range w.calls {
			call(e, time.Now())
		}
	}()
	return newLeaser(w), func() { close(w.calls) }
}

func (s *lateLeases) held() map[int]relaystore.Renewal {
	held := map[int]relaystore.Renewal{}
	for lane := range outbox.Lanes {
		if s.taken {
			held[lane] = relaystore.Renewal{Epoch: 1, Renewed: lane != s.locked}
		}
	}
	return held
}

func (s *lateLeases) Beat(context.Context, relaystore.Identity, []int, time.Duration) (map[int]relaystore.Renewal, error) {
	s.asked = time.Now()
	held := s.held()
	time.Sleep(s.late)
	return held, nil
}

func (s *lateLeases) Take(_ context.Context, _ string, lanes []int, _ int, _ time.Duration) (map[int]relaystore.Taken, error) {
	s.asked, s.taken = time.Now(), true
	got := map[int]relaystore.Taken{}
	for _, lane := range lanes {
		got[lane] = relaystore.Taken{Epoch: 1}
	}
	time.Sleep(s.late)
	return got, nil
}

func (s *lateLeases) Census(context.Context) ([]relaystore.Lease, []relaystore.Worker, error) {
	leases := []relaystore.Lease{{Lane: relaystore.UpkeepLane, Owner: "other", Left: time.Hour}}
	for lane := range outbox.Lanes {
		l := relaystore.Lease{Lane: lane, Left: -time.Second}
		if s.taken {
			l = relaystore.Lease{Lane: lane, Owner: "me", Epoch: 1, Left: time.Second}
		}
		leases = append(leases, l)
	}
	return leases, []relaystore.Worker{{Owner: "me", Ready: true}}, nil
}

// The database counts a lease from when it was asked for it. A worker that counts from
// the answer trusts it for longer than it lasts.
func TestLeaser_TrustsALeaseFromWhenItAskedForIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const term, most = 15 * time.Second, 15 * time.Second * 9 / 10
		store := &lateLeases{late: term / 4, locked: relaystore.UpkeepLane}
		s, stop := store.leaser(term)
		defer stop()
		for _, last := range []string{"take", "first heartbeat", "second heartbeat"} {
			if err := s.step(t.Context()); err != nil {
				t.Fatal(err)
			}
			if passed := time.Since(store.asked); passed < store.late {
				t.Fatalf("%s: its answer came after %v: the test shows nothing", last, passed)
			}
			s.call(t.Context(), func(e *engine, _ time.Time) {
				for number, l := range e.lanes {
					if l == nil {
						t.Errorf("%s: lane %d is not held", last, number)
						return
					}
					if trusted := l.trusted.Sub(store.asked); trusted > most || trusted <= store.late {
						t.Errorf("%s: lane %d is trusted for %v from when it was asked for, want %v at most", last, number, trusted, most)
						return
					}
				}
			})
			time.Sleep(term / 15)
		}
	})
}

// The heartbeat extends the other leases beside one that it cannot extend, since somebody
// has locked its row: to take the lane over, perhaps.
func TestLeaser_TrustsNoLeaseThatWasNotExtended(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const term, locked = 15 * time.Second, 3
		s, stop := (&lateLeases{locked: locked}).leaser(term)
		defer stop()
		var trusted [2][outbox.Lanes]time.Time // when they were taken, and after a heartbeat
		for i := range trusted {
			if err := s.step(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.call(t.Context(), func(e *engine, _ time.Time) {
				for number, l := range e.lanes {
					if l != nil {
						trusted[i][number] = l.trusted
					}
				}
			})
			time.Sleep(term / 15)
		}
		for number, taken := range trusted[0] {
			if longer := trusted[1][number].After(taken); taken.IsZero() || longer != (number != locked) {
				t.Errorf("lane %d is trusted until %v, and after the heartbeat until %v", number, taken, trusted[1][number])
			}
		}
	})
}

// At rest a heartbeat is repeated when there is something new to say, and before much of the
// lease has passed.
func TestLeaser_RepeatsAHeartbeatInTime(t *testing.T) {
	t.Parallel()
	const lease = 15 * time.Second
	sent := time.Unix(1000, 0)
	me, epochs := relaystore.Identity{Owner: "me", Ready: true}, map[int]int64{1: 5, 2: 7}
	last := heartbeat{sentAt: sent, as: me, epochs: epochs, upkeep: 3}
	unready := me
	unready.Ready = false
	for name, c := range map[string]struct {
		after  time.Duration
		as     relaystore.Identity
		epochs map[int]int64
		upkeep int64
		stands bool
	}{
		"the same":          {2 * time.Second, me, map[int]int64{1: 5, 2: 7}, 3, true},
		"a fifth later":     {lease / 5, me, epochs, 3, false},
		"not ready":         {0, unready, epochs, 3, false},
		"a lane taken":      {0, me, map[int]int64{1: 5, 2: 7, 3: 1}, 3, false},
		"a lane given back": {0, me, map[int]int64{1: 5}, 3, false},
		"a lane again":      {0, me, map[int]int64{1: 5, 2: 8}, 3, false},
		"no upkeep":         {0, me, epochs, 0, false},
	} {
		if got := last.stands(sent.Add(c.after), c.as, c.epochs, c.upkeep, lease); got != c.stands {
			t.Errorf("%s: stands %t", name, got)
		}
	}
	if (&heartbeat{}).stands(sent, relaystore.Identity{}, nil, 0, lease) {
		t.Error("a heartbeat that failed stands")
	}
}

// The server's clock was set back after a worker had died: its leases would last for
// as long as the clock is wrong. A live worker renews its own.
func TestLeaser_FindsWhatNobodyRenews(t *testing.T) {
	t.Parallel()
	l := newLeaser(&worker{owner: "me", cfg: Config{Lease: time.Minute}})
	until := int64(0)
	look := func(now time.Time) (old []relaystore.Lease, gone []relaystore.Worker) {
		until++ // of what is renewed
		leases := []relaystore.Lease{
			{Lane: 1, Owner: "dead", Epoch: 1, Left: time.Hour},
			{Lane: 2, Owner: "dead", Epoch: 1, Left: time.Hour},
			{Lane: 3, Owner: "alive", Epoch: 1, Left: time.Hour, Until: until},
			{Lane: 4, Owner: "alive", Epoch: 1, Left: time.Hour, Until: until},
			{Lane: 5, Owner: "me", Epoch: 1, Left: time.Hour},
			{Lane: 6, Owner: "", Left: -time.Hour},
		}
		return l.unrenewed(leases, []relaystore.Worker{{Owner: "dead", Ready: true}, {Owner: "alive", Ready: true, Until: until}, {Owner: "me", Ready: true}}, now)
	}
	begin := time.Now()
	for _, after := range []time.Duration{0, time.Minute, 2 * time.Minute} {
		if old, gone := look(begin.Add(after)); len(old)+len(gone) > 0 {
			t.Errorf("after %v: %v, %v", after, old, gone)
		}
	}
	old, gone := look(begin.Add(2*time.Minute + 1))
	if len(old) != 2 || old[0].Owner != "dead" || old[1].Owner != "dead" || len(gone) != 1 || gone[0].Owner != "dead" {
		t.Fatalf("unrenewed are %v, %v; want the dead worker and its two lanes", old, gone)
	}
}

// The heartbeat that ends an outage tells others that the worker is fit, as they are: their rows are of
// before the outage, and it would give them all its lanes.
func TestLeaser_KeepsItsLanesAfterAnOutageForAll(t *testing.T) {
	t.Parallel()
	const lease = 15 * time.Second
	w := &worker{owner: "me", cfg: Config{Lease: lease}, health: newHealth(lease)}
	s, now := newLeaser(w), time.Now()
	for at := now.Add(-9 * time.Second); at.Before(now); at = at.Add(time.Second) {
		for _, o := range []operation{opHeartbeat, opRead} {
			w.health.begin(o, at)
			w.health.end(o, at.Add(900*time.Millisecond), false)
		}
	}
	me := s.identity(false)
	w.health.begin(opHeartbeat, now)
	w.health.end(opHeartbeat, now, true)
	var leases []relaystore.Lease
	var held []int
	for lane := range outbox.Lanes {
		owner := "other"
		if lane%2 == 0 {
			owner, held = "me", append(held, lane)
		}
		leases = append(leases, relaystore.Lease{Lane: lane, Owner: owner, Left: lease})
	}
	peers := []relaystore.Worker{{Owner: "me", Ready: me.Ready}, {Owner: "other", Ready: true}}
	if share := divide("me", peers, leases, held, func(int) bool { return true }, nil, lease); len(share.give) > 0 {
		t.Errorf("gives back %d of %d lanes; problem %q", len(share.give), len(held), me.Problem)
	}
	if again := s.identity(false); !again.Ready {
		t.Errorf("then it is not ready: %s", again.Problem)
	}
	select {
	case <-w.health.back:
	default:
		t.Error("the loop is not told, and waits for the ends of its pauses")
	}
}

// keptLeases is the database of a worker that gives its lanes back. At first it cannot.
type keptLeases struct {
	lateLeases
	failing  bool
	released map[int]int64 // last
	sure     []int         // when it left
}

func (s *keptLeases) Release(_ context.Context, _ string, epochs map[int]int64, _ []int) error {
	s.released = epochs
	if s.failing {
		return errors.New("connection reset")
	}
	return nil
}

func (s *keptLeases) Leave(_ context.Context, _ string, sure []int) error {
	s.sure = slices.Sorted(slices.Values(sure))
	return nil
}

// A worker that stops drops a lane, and its release fails. With it went what was known of the lane: a message of it
// may have been delivered. When the worker leaves, it gives the lane back as one of which nobody knows, and so a lane
// with a message that has no answer.
func TestLeaser_LeavesALaneThatItCouldNotReleaseAsUnsure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const number, unanswered = 3, 5
		store := &keptLeases{failing: true}
		s, stop := store.leaser(15 * time.Second)
		defer stop()
		s.leases = store
		s.call(t.Context(), func(e *engine, now time.Time) {
			for n := range e.lanes {
				e.hold(n, relaystore.Taken{Epoch: 1}, now.Add(time.Hour))
			}
			e.drain(number)
			e.lanes[unanswered].unsureUntil = now
		})
		if err := s.step(t.Context()); err == nil {
			t.Fatal("the lane was released: the test shows nothing")
		}
		store.failing = false
		s.leave(t.Context())
		if len(store.sure) != outbox.Lanes-1 || store.sure[0] != relaystore.UpkeepLane || slices.Contains(store.sure, number) || slices.Contains(store.sure, unanswered) {
			t.Errorf("given back as sure are %v", store.sure)
		}
	})
}

// A server that was promoted has lost a takeover of the upkeep, and says that the worker holds it since an earlier
// one. Under the epoch that the worker knows, every call of the upkeep would be refused.
func TestLeaser_GivesBackAnUpkeepOfAnotherEpoch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &keptLeases{}
		s, stop := store.leaser(15 * time.Second)
		defer stop()
		s.leases = store
		for _, known := range []int64{4, 3} {
			s.upkeepLease.hold(known)
			store.released = nil
			have, _ := s.holding(t.Context())
			held := map[int]relaystore.Renewal{relaystore.UpkeepLane: {Epoch: 3, Renewed: true}}
			s.renewed(t.Context(), have, held, time.Now())
			if err := s.releaseStray(t.Context(), have, held); err != nil {
				t.Fatal(err)
			}
			if kept := s.upkeepLease.held() == known; kept != (known == 3) || kept == maps.Equal(store.released, map[int]int64{relaystore.UpkeepLane: 3}) {
				t.Errorf("known is epoch %d: kept %v, released %v", known, kept, store.released)
			}
		}
	})
}
