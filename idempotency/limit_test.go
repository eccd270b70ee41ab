package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// Keys of dead processes, and keys with an unknown outcome, do not count towards the limit.
func TestMiddleware_OnlyRunningKeysCount(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		snapshot := struct{ idempotency.Store }{store}
		engine := newEngine(t, snapshot, func(c *idempotency.Config) { c.Keys.MaxOutstanding = 5 })
		bad := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
		for i := range 20 {
			if w := do(t, bad, post("/", "x", withKey(fmt.Sprint("unknown", i)))); w.Code != http.StatusBadGateway {
				t.Errorf("%d: %d %s", i, w.Code, w.Body)
			}
		}
		expectProblem(t, do(t, bad, post("/", "x", withKey("unknown7"))), http.StatusConflict, "outcome-unknown")
	})
}

// unanswered answers no claim until it is released.
type unanswered struct {
	idempotency.Store
	claims, counts atomic.Int64
	release        chan struct{}
}

func (s *unanswered) Claim(ctx context.Context, claim idempotency.Claim) (idempotency.Record, bool, error) {
	s.claims.Add(1)
	<-s.release
	return s.Store.Claim(ctx, claim)
}

func (s *unanswered) Outstanding(ctx context.Context, caller idempotency.Caller, limit int) (int, error) {
	s.counts.Add(1)
	return s.Store.Outstanding(ctx, caller, limit)
}

// Claims that the store has not answered count: a store that is slow raises no limit. Nobody is
// refused because of them, since they may fail.
func TestMiddleware_ClaimsUnderWayCountTowardsTheLimit(t *testing.T) {
	t.Parallel()
	const limit, requests, tries = 40, 200, 40
	store := &unanswered{Store: &idempotency.MemoryStore{}, release: make(chan struct{})}
	goOn := make(chan struct{})
	var running, refused atomic.Int64
	handler := newEngine(t, struct{ idempotency.Store }{store}, func(c *idempotency.Config) {
		c.Keys.MaxOutstanding, c.Timeout, c.Failures.Lease = limit, testserver.MaxWait, 2*testserver.MaxWait
	}).Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		running.Add(1)
		<-goOn
	}))
	var sending sync.WaitGroup
	for i := range requests {
		sending.Go(func() {
			if w := do(t, handler, post("/", "x", withKey(fmt.Sprint(i)))); w.Code != http.StatusOK {
				refused.Add(1)
				expectProblem(t, w, http.StatusTooManyRequests, "too-many-outstanding")
			}
		})
	}
	eventually(t, "all claim, or count in vain", func() bool { return store.claims.Load() == requests || store.counts.Load() >= tries })
	if n := store.claims.Load(); n > limit || n < limit/2 || refused.Load() > 0 {
		t.Errorf("%d claims under way, %d refused", n, refused.Load())
	}
	close(store.release)
	eventually(t, "all have started or been refused", func() bool { return running.Load()+refused.Load() == requests })
	close(goOn)
	sending.Wait()
	if n := running.Load(); n > limit || n < limit/2 {
		t.Errorf("%d ran, with a limit of %d", n, limit)
	}
}

// stallingStore does not answer one count, until its context ends.
type stallingStore struct {
	idempotency.Store
	counts atomic.Int64
}

func (s *stallingStore) Outstanding(ctx context.Context, caller idempotency.Caller, limit int) (int, error) {
	if s.counts.Add(1) == 1 {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return s.Store.Outstanding(ctx, caller, limit)
}

// A dead connection delays only the request that uses it.
func TestMiddleware_ACountThatStallsHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	store := &stallingStore{Store: &idempotency.MemoryStore{}}
	handler := newEngine(t, store, func(c *idempotency.Config) { c.Timeout = 5 * time.Second }).Middleware(ok("ran"))
	var sending sync.WaitGroup
	var stalled, ran atomic.Int64
	for i := range 40 {
		sending.Go(func() {
			began := time.Now()
			w := do(t, handler, post("/", "x", withKey(fmt.Sprint(i))))
			switch {
			case w.Code == http.StatusOK && time.Since(began) < 4*time.Second:
				ran.Add(1)
			default:
				stalled.Add(1)
			}
		})
	}
	sending.Wait()
	if ran.Load() != 39 || stalled.Load() != 1 {
		t.Errorf("%d ran, %d were held up", ran.Load(), stalled.Load())
	}
	if n := store.counts.Load(); n > 20 {
		t.Errorf("counted %d times", n)
	}
}
