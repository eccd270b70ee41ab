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
