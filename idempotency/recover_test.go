package idempotency_test

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// Of two copies that asked Failures.Recover about the same crash, one runs: the other's claim has been taken
// over while it asked.
func TestMiddleware_RunsAgainOnlyWhatIsStillItsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, runs := &idempotency.MemoryStore{}, 0
		do(t, newEngine(t, dyingStore{store}, nil).Middleware(ok("lost")), post("/", "x"))
		time.Sleep(time.Minute)
		var asked atomic.Int64
		handler := newEngine(t, store, func(c *idempotency.Config) {
			c.Failures.Crashed = idempotency.CrashedRecover
			c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) {
				if asked.Add(1) == 1 {
					time.Sleep(c.Failures.Lease + time.Minute)
				}
				return idempotency.Recovery{RunAgain: true}, nil
			}
		}).Middleware(counted(&runs))
		var first sync.WaitGroup
		first.Go(func() {
			if w := do(t, handler, post("/", "x")); w.Header().Get("Idempotency-Replayed") != "true" {
				t.Errorf("the one that asked for long: %d %s", w.Code, w.Body)
			}
		})
		time.Sleep(45 * time.Second)
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK {
			t.Errorf("the one that took over: %d %s", w.Code, w.Body)
		}
		first.Wait()
		if runs != 1 || asked.Load() != 2 {
			t.Errorf("%d runs, asked %d times", runs, asked.Load())
		}
	})
}

// A request whose Recover took all its time does not begin; the next copy asks again.
func TestMiddleware_RunsNothingAgainWithoutTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, runs := &idempotency.MemoryStore{}, 0
		do(t, newEngine(t, dyingStore{store}, nil).Middleware(ok("lost")), post("/", "x"))
		time.Sleep(time.Minute)
		takes := 27 * time.Second // longer than Timeout, shorter than the lease
		handler := newEngine(t, store, func(c *idempotency.Config) {
			c.Failures.Crashed = idempotency.CrashedRecover
			c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) {
				time.Sleep(takes)
				return idempotency.Recovery{RunAgain: true}, nil
			}
		}).Middleware(counted(&runs))
		expectProblem(t, do(t, handler, post("/", "x")), 409, "outcome-unknown")
		if runs != 0 {
			t.Error("it ran")
		}
		takes = time.Second
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK || runs != 1 {
			t.Errorf("then %d %s, %d runs", w.Code, w.Body, runs)
		}
	})
}

// distantStore answers its first claim long after it was granted.
type distantStore struct {
	idempotency.Store
	delay *atomic.Int64
}

func (s distantStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	delay := s.delay.Swap(0)
	r, granted, err := s.Store.Claim(ctx, c)
	time.Sleep(time.Duration(delay))
	return r, granted, err
}

// The lease of a claim is renewed before it ends, also if the claim was answered late, or if Recover took
// most of it: no copy runs beside a handler.
func TestMiddleware_KeepsALeaseThatHasBegunLongAgo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, store := range map[string]idempotency.Store{"claim": &idempotency.MemoryStore{}, "recover": &idempotency.MemoryStore{}} {
			through := store
			if name == "claim" {
				var delay atomic.Int64
				delay.Store(int64(24 * time.Second))
				through = distantStore{store, &delay}
			} else {
				do(t, newEngine(t, dyingStore{store}, nil).Middleware(ok("lost")), post("/", "x"))
				time.Sleep(time.Minute)
			}
			running, most, runs := 0, 0, 0
			handler := newEngine(t, through, func(c *idempotency.Config) {
				c.Failures.Crashed = idempotency.CrashedTakeOver
				if name == "recover" {
					c.Failures.Crashed = idempotency.CrashedRecover
					c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) {
						time.Sleep(24 * time.Second)
						return idempotency.Recovery{RunAgain: true}, nil
					}
				}
			}).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				runs++
				running++
				most = max(most, running)
				time.Sleep(2 * time.Minute)
				running--
				_, _ = io.WriteString(w, "done")
			}))
			var first sync.WaitGroup
			first.Go(func() { do(t, handler, post("/", "x")) })
			time.Sleep(32 * time.Second) // the first lease has ended
			expectProblem(t, do(t, handler, post("/", "x")), 409, "in-progress")
			first.Wait()
			if w := do(t, handler, post("/", "x")); w.Body.String() != "done" || runs != 1 || most != 1 {
				t.Errorf("%s: %d %s, %d runs, %d at a time", name, w.Code, w.Body, runs, most)
			}
		}
	})
}
