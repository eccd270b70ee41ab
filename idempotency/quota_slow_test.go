package idempotency_test

import (
	"bytes"
	"context"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// heldCounts does not add those of the counts that hold selects until it is released.
type heldCounts struct {
	idempotency.MemoryStore
	hold    func(keys int64) bool
	held    chan struct{} // one for each count that is held
	release chan struct{}
}

func (s *heldCounts) AddUsage(ctx context.Context, caller idempotency.Caller, window time.Duration, keys, bytes int64) (idempotency.Usage, error) {
	if s.hold(keys) {
		select {
		case s.held <- struct{}{}:
			<-s.release
		case <-s.release:
		}
	}
	return s.MemoryStore.AddUsage(ctx, caller, window, keys, bytes)
}

// What is being added counts: a store that is slow, or adds counts in another order than they
// were made, raises no quota.
func TestQuota_HoldsWhileCountsAreBeingAdded(t *testing.T) {
	t.Parallel()
	const requests = 60
	var counts atomic.Int64
	for name, c := range map[string]struct {
		quota idempotency.Quota
		hold  func(keys int64) bool
		most  int64 // runs while they are held
	}{
		"keys":  {idempotency.Quota{Keys: 20}, func(keys int64) bool { return keys > 1 }, 20 + 20/4},
		"bytes": {idempotency.Quota{Bytes: 100_000}, func(int64) bool { return counts.Add(1) > 1 }, 1 + 25_000/9_000 + 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.quota.Window = 31 * 24 * time.Hour
			store := &heldCounts{hold: c.hold, held: make(chan struct{}), release: make(chan struct{})}
			var runs atomic.Int64
			handler := newEngine(t, store, func(cfg *idempotency.Config) {
				cfg.Timeout, cfg.Keys.Quota = 2*time.Minute, c.quota
			}).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				runs.Add(1)
				_, _ = w.Write(bytes.Repeat([]byte("x"), 9_000))
			}))
			var asking sync.WaitGroup
			done := make(chan struct{}, requests)
			held := 0
			for i := range requests {
				asking.Go(func() {
					do(t, handler, post("/", "x", withKey(strconv.Itoa(i))))
					done <- struct{}{}
				})
				select {
				case <-store.held:
					held++
				case <-done:
				}
			}
			if n := runs.Load(); n > c.most || held == 0 {
				t.Errorf("%d runs while %d counts were held", n, held)
			}
			close(store.release)
			asking.Wait()
		})
	}
}
