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

// slowRenewals is a store that takes a second to renew a lease.
type slowRenewals struct{ idempotency.Store }

func (s slowRenewals) Extend(ctx context.Context, id idempotency.ID, owner idempotency.Owner, lease time.Duration) error {
	time.Sleep(time.Second)
	return s.Store.Extend(ctx, id, owner, lease)
}

// A handler that takes as long as four leases keeps its key all along.
func TestMiddleware_ALongRunKeepsItsKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		engine := newEngine(t, slowRenewals{&idempotency.MemoryStore{}}, func(c *idempotency.Config) {
			c.Failures.Lease, c.Failures.Crashed = 30*time.Second, idempotency.CrashedTakeOver
		})
		var runs atomic.Int64
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			runs.Add(1)
			time.Sleep(2 * time.Minute)
			_, _ = io.WriteString(w, "done")
		}))
		var sending sync.WaitGroup
		sending.Go(func() { do(t, handler, post("/", "x")) })
		for range 110 {
			time.Sleep(time.Second)
			expectProblem(t, do(t, handler, post("/", "x")), http.StatusConflict, "in-progress")
		}
		sending.Wait()
		if w := do(t, handler, post("/", "x")); w.Body.String() != "done" || runs.Load() != 1 {
			t.Errorf("%d %s after %d runs", w.Code, w.Body, runs.Load())
		}
	})
}

// A client that hangs up does not end its handler.
func TestMiddleware_AHandlerOutlivesItsClient(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, nil)
		ways := map[string]func(http.Handler) http.Handler{"snapshot": engine.Middleware}
		if _, ok := store.(*idempotency.SQLStore); ok {
			ways["tx"] = engine.TxMiddleware
		}
		for name, wrap := range ways {
			client, hangUp := context.WithCancel(t.Context())
			handler := wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				hangUp()
				if err := r.Context().Err(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				w.WriteHeader(http.StatusCreated)
			}))
			do(t, handler, post("/", "x", withKey(name)).WithContext(client))
			if w := do(t, handler, post("/", "x", withKey(name))); w.Code != http.StatusCreated || w.Header().Get("Idempotency-Replayed") != "true" {
				t.Errorf("%s: then %d %s", name, w.Code, w.Body)
			}
			hangUp()
		}
	})
}
