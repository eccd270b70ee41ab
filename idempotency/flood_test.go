package idempotency_test

import (
	"context"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A flood of distinct keys, from many callers and from one: memory stays flat, the purge
// keeps up, and a caller with too many keys outstanding gets 429.
func TestMiddleware_SurvivesAFloodOfKeys(t *testing.T) {
	t.Parallel()
	keys := testserver.Rounds(1_000, 1_000_000)
	p := onPostgres(t)
	p.prepare = true
	p.open(t)
	p.db.SetMaxOpenConns(16)
	engine := p.engine(t, func(c *idempotency.Config) {
		c.Retention, c.Expiry.PurgeEvery, c.Expiry.PurgeBatch = time.Second, 50*time.Millisecond, 5000
	})
	ctx, cancel := context.WithCancel(t.Context())
	var purging sync.WaitGroup
	purging.Go(func() {
		if err := engine.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	handler := engine.Middleware(ok("done"))
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var next, most atomic.Int64
	flood := func(upTo int) {
		var sending sync.WaitGroup
		for range 16 {
			sending.Go(func() {
				for {
					i := next.Add(1)
					if i > int64(upTo) {
						return
					}
					w := do(t, handler, post("/", "x", withKey(strconv.FormatInt(i, 10)), func(r *http.Request) {
						r.Header.Set("X-User", strconv.FormatInt(i%100_000, 10))
					}))
					if w.Code != http.StatusOK {
						t.Errorf("key %d: %d %s", i, w.Code, w.Body)
					}
					if i%500 == 0 {
						most.Store(max(most.Load(), int64(p.count(t, `select count(*) from {{idempotency}}`))))
					}
				}
			})
		}
		sending.Wait()
		next.Store(int64(upTo))
	}
	began := time.Now()
	flood(keys / 10)
	early := heap()
	flood(keys)
	took := time.Since(began)
	var late uint64
	eventually(t, "the heap has not grown", func() bool { // other tests use it, too, for a while
		late = heap()
		return late <= early+16<<20
	})
	t.Logf("%d keys in %v, heap %d KB after a tenth, %d KB at the end, at most %d rows", keys, took.Round(time.Second), early>>10, late>>10, most.Load())
	// What comes in while a record lives, and as much again.
	if limit := int64(float64(keys)/took.Seconds()*4) + 10_000; most.Load() > limit {
		t.Errorf("up to %d rows, more than %d", most.Load(), limit)
	}
	eventually(t, "all is purged", func() bool { return p.count(t, `select count(*) from {{idempotency}}`) == 0 })
	cancel()
	purging.Wait()
}

func TestMiddleware_AnswersAFloodOfOneCallerWith429(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.db.SetMaxOpenConns(16)
	const limit, requests = 100, 600
	goOn := make(chan struct{})
	var running, refused atomic.Int64
	handler := p.engine(t, func(c *idempotency.Config) {
		c.Keys.MaxOutstanding, c.Timeout, c.Failures.Lease = limit, testserver.MaxWait, 2*testserver.MaxWait
	}).Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		running.Add(1)
		<-goOn
	}))
	var sending sync.WaitGroup
	for i := range requests {
		sending.Go(func() {
			switch w := do(t, handler, post("/", "x", withKey(strconv.Itoa(i)))); w.Code {
			case http.StatusTooManyRequests:
				refused.Add(1)
			case http.StatusOK:
			default:
				t.Errorf("key %d: %d %s", i, w.Code, w.Body)
				refused.Add(1)
			}
		})
	}
	eventually(t, "all have started or been refused", func() bool { return running.Load()+refused.Load() == requests })
	close(goOn)
	sending.Wait()
	t.Logf("%d ran, %d were refused", running.Load(), refused.Load())
	if running.Load() < limit/2 || running.Load() > 4*limit {
		t.Errorf("%d ran, with a limit of %d", running.Load(), limit)
	}
}
