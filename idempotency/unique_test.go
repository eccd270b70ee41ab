package idempotency_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// A process that was killed in a handler, and starts again with its unique name, does not
// wait for its own lease. Processes of other names, and the same process, do.
func TestUniqueName_TheNextProcessContinuesAtOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		for name, transactional := range map[string]bool{"transactional": true, "snapshot": false} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				settings := p.settings()
				settings.Transactional, settings.Timeout, settings.Lease, settings.UniqueName = transactional, time.Hour, 2*time.Hour, "api-0"+name
				killed := startServer(t, settings)
				q := newRequest()
				killed.arm(syscall.SIGKILL, "inside the handler")
				if a, err := q.send(t.Context(), http.DefaultClient, killed.url, "lost"); err == nil {
					t.Fatalf("the process was not killed: %v", a)
				}
				next := startServer(t, settings)
				settings.UniqueName = "api-1" + name
				other := startServer(t, settings)
				settings.UniqueName = ""
				nameless := startServer(t, settings)
				for _, s := range []*server{other, nameless} {
					if a, err := q.send(t.Context(), http.DefaultClient, s.url, "too early"); err != nil || !strings.Contains(a.body, "in-progress") {
						t.Errorf("another process answered %v, %v", a, err)
					}
				}
				a, err := q.send(t.Context(), http.DefaultClient, next.url, "first")
				if !transactional { // whether there was an effect is unknown, and answered so at once
					if err != nil || !strings.Contains(a.body, "outcome-unknown") {
						t.Errorf("the next process answered %v, %v", a, err)
					}
					return
				}
				if err != nil || a.status != http.StatusCreated {
					t.Errorf("the next process answered %v, %v", a, err)
				}
				if b, err := q.send(t.Context(), http.DefaultClient, other.url, "second"); err != nil || b != a {
					t.Errorf("then another process answered %v, %v; want %v", b, err, a)
				}
				q.expectOnce(t, p)
			})
		}
	})
}

// A request that runs is not taken over by another one of its own process.
func TestUniqueName_ARunningRequestKeepsItsKey(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		e := p.engine(t, func(c *idempotency.Config) { c.Failures.UniqueName = "api-0" })
		begun, goOn := make(chan struct{}), make(chan struct{})
		var runs atomic.Int64
		h := e.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			runs.Add(1)
			close(begun)
			<-goOn
			w.WriteHeader(http.StatusCreated)
		}))
		first := make(chan int, 1)
		go func() { first <- do(t, h, post("/", "", withKey("one"))).Code }()
		<-begun
		if w := do(t, h, post("/", "", withKey("one"))); w.Code != http.StatusConflict {
			t.Errorf("the second request got %d", w.Code)
		}
		close(goOn)
		if code := <-first; code != http.StatusCreated || runs.Load() != 1 {
			t.Errorf("the first request got %d; %d runs", code, runs.Load())
		}
	})
}
