package idempotency_test

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
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

// interrupted leaves the keys with running leases of a process that had the unique name
// before. Its requests go on until the returned function is called.
func (p *testDB) interrupted(t *testing.T, e *idempotency.Engine, keys ...string) (goOn func()) {
	t.Helper()
	begun, on := make(chan struct{}), make(chan struct{})
	h := e.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		begun <- struct{}{}
		<-on
	}))
	var running sync.WaitGroup
	for _, key := range keys {
		running.Go(func() { do(t, h, post("/", "", withKey(key))) })
		<-begun
	}
	former := `overlay(owner placing '\x0badf00d'::bytea from 7 for 4)`
	if p.driver == "sqlite" {
		former = `cast(substr(owner, 1, 6) || x'0badf00d' || substr(owner, 11) as blob)`
	}
	p.exec(t, `update {{idempotency}} set owner = `+former)
	goOn = sync.OnceFunc(func() { close(on); running.Wait() })
	t.Cleanup(goOn)
	return goOn
}

// The process that crashed had as many keys as its caller may have.
func TestUniqueName_ARetryIsNoFurtherOutstandingKey(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		e := p.engine(t, func(c *idempotency.Config) { c.Keys.MaxOutstanding, c.Failures.UniqueName = 2, "api-0" })
		p.interrupted(t, e, "a", "b")
		h := e.TxMiddleware(ok("done"))
		testserver.Eventually(t, "the keys are counted", func() bool { return do(t, h, post("/", "", withKey("c"))).Code == http.StatusTooManyRequests })
		for _, key := range []string{"a", "b", "c"} {
			if w := do(t, h, post("/", "", withKey(key))); w.Code != http.StatusOK {
				t.Errorf("key %s got %d: %s", key, w.Code, w.Body)
			}
		}
	})
}

// A process froze, or was cut off, after its last statement and before its COMMIT. Retries
// are answered at once, and take no connection from other requests.
func TestUniqueName_WaitsForNoFrozenProcess(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	e := p.engine(t, func(c *idempotency.Config) {
		c.Failures.UniqueName, c.Timeout, c.Failures.Lease = "api-0", testserver.MaxWait, 2*testserver.MaxWait
	})
	goOn := p.interrupted(t, e, "a")
	frozen, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer frozen.Rollback() //nolint:errcheck // it is rolled back before
	if _, err := frozen.ExecContext(t.Context(), p.expand(t, `update {{idempotency}} set status = 200`)); err != nil {
		t.Fatal(err)
	}
	p.db.SetMaxOpenConns(p.db.Stats().InUse + 1)
	h := e.TxMiddleware(ok("done"))
	expectProblem(t, do(t, h, post("/", "", withKey("a"))), http.StatusConflict, "in-progress")
	if w := do(t, h, post("/", "", withKey("b"))); w.Code != http.StatusOK {
		t.Errorf("another request got %d", w.Code)
	}
	if err := frozen.Rollback(); err != nil {
		t.Fatal(err)
	}
	if w := do(t, h, post("/", "", withKey("a"))); w.Code != http.StatusOK {
		t.Errorf("then %d", w.Code)
	}
	goOn()
}

// A process froze and was replaced by one of its name, which took its keys. When it resumes,
// its effects are rolled back, and its client gets the other's answer.
func TestUniqueName_AFrozenProcessThatResumesIsRolledBack(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	for _, point := range []string{"after claim", "inside the handler", "after effect", "before commit"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			for _, size := range shapes {
				settings := p.settings()
				settings.GroupSize, settings.UniqueName = size, "api-"+point
				frozen, next := startServer(t, settings), startServer(t, settings)
				frozen.arm(syscall.SIGSTOP, point)
				expectTakeover(t, p, frozen, next)
			}
		})
	}
}
