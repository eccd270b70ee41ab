package relay

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/outbox"
)

// lateLeases is the database of a worker that is alone. It does at once what it is
// asked, and answers late.
type lateLeases struct {
	leaseStore
	late  time.Duration
	taken bool
	asked time.Time // when the last call came that takes or extends leases
}

func (s *lateLeases) held() map[int]renewal {
	held := map[int]renewal{}
	for lane := range outbox.Lanes {
		if s.taken {
			held[lane] = renewal{epoch: 1, renewed: true}
		}
	}
	return held
}

func (s *lateLeases) beat(context.Context, identity, []int, time.Duration) (map[int]renewal, error) {
	s.asked = time.Now()
	held := s.held()
	time.Sleep(s.late)
	return held, nil
}

func (s *lateLeases) take(_ context.Context, _ string, lanes []int, _ int, _ time.Duration) (map[int]taken, error) {
	s.asked, s.taken = time.Now(), true
	got := map[int]taken{}
	for _, lane := range lanes {
		got[lane] = taken{epoch: 1}
	}
	time.Sleep(s.late)
	return got, nil
}

func (s *lateLeases) census(context.Context) ([]lease, []peer, error) {
	leases := []lease{{lane: upkeepLane, owner: "other", left: time.Hour}}
	for lane := range outbox.Lanes {
		l := lease{lane: lane, left: -time.Second}
		if s.taken {
			l = lease{lane: lane, owner: "me", epoch: 1, left: time.Second}
		}
		leases = append(leases, l)
	}
	return leases, []peer{{owner: "me", ready: true}}, nil
}

// The database counts a lease from when it was asked for it. A worker that counts from
// the answer trusts it for longer than it lasts.
func TestLeaser_TrustsALeaseFromWhenItAskedForIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const term, most = 15 * time.Second, 15 * time.Second * 9 / 10
		store := &lateLeases{late: term / 4}
		w := &worker{
			owner: "me", cfg: Config{Lease: term}, leases: store, health: newHealth(term), bounds: bounded.New(maxAbandoned),
			log: slog.New(slog.DiscardHandler), calls: make(chan func(*engine, time.Time)),
		}
		e := newEngine(limits{})
		go func() {
			for call := range w.calls {
				call(e, time.Now())
			}
		}()
		defer close(w.calls)
		s := newLeaser(w)
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
