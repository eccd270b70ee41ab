package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// byUser is a scope of the user in a header.
func byUser(r *http.Request) (idempotency.Scope, error) {
	return idempotency.Scope{Principal: "user " + r.Header.Get("User")}, nil
}

func user(name string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("User", name) }
}

// One caller is stopped at its quota, not much above it; others are not; and what it has
// stored is replayed.
func TestQuota_StopsACallerAndReplaysWhatItHas(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		const most = 20
		engine := newEngine(t, store, func(c *idempotency.Config) {
			c.Scope = byUser
			c.Keys.Quota = idempotency.Quota{Keys: most, Window: 31 * 24 * time.Hour}
		})
		var runs atomic.Int64
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			runs.Add(1)
			if r.URL.Path == "/refuse" {
				w.WriteHeader(http.StatusForbidden) // releases the key
			}
		}))
		for i := range 2 * most {
			if w := do(t, handler, post("/refuse", "x", user("eve"), withKey(fmt.Sprint("r", i)))); w.Code != http.StatusForbidden {
				t.Fatalf("what leaves no key was counted: %d %s", w.Code, w.Body)
			}
		}
		runs.Store(0)
		var refused int
		for i := range 2 * most {
			for range 3 { // retries are not counted
				w := do(t, handler, post("/", "x", user("eve"), withKey(strconv.Itoa(i))))
				if w.Code == http.StatusOK {
					continue
				}
				expectProblem(t, w, http.StatusTooManyRequests, "over-quota")
				if left, err := strconv.Atoi(w.Header().Get("Retry-After")); err != nil || left < 1 || left > 31*24*3600 {
					t.Errorf("Retry-After %q", w.Header().Get("Retry-After"))
				}
				refused++
			}
		}
		if n := runs.Load(); n != most || refused != 3*most {
			t.Errorf("%d runs, %d refused", n, refused)
		}
		if w := do(t, handler, post("/", "x", user("eve"), withKey("0"))); w.Header().Get("Idempotency-Replayed") != "true" {
			t.Errorf("not replayed: %d %s", w.Code, w.Body)
		}
		if w := do(t, handler, post("/", "x", user("bob"), withKey("0"))); w.Code != http.StatusOK || runs.Load() != most+1 {
			t.Errorf("another caller: %d %s", w.Code, w.Body)
		}
	})
}

func TestQuota_StopsACallerAtItsBytes(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) {
			c.Scope = byUser
			c.Keys.Quota = idempotency.Quota{Bytes: 100_000, Window: 31 * 24 * time.Hour}
		})
		runs := 0
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			runs++
			_, _ = w.Write(bytes.Repeat([]byte("x"), 9_000))
		}))
		for i := range 30 {
			do(t, handler, post("/", "x", user("eve"), withKey(strconv.Itoa(i))))
		}
		if runs < 10 || runs > 15 { // with at most a quarter of what was left
			t.Errorf("%d responses of 9,000 bytes were stored", runs)
		}
	})
}

// Many requests of one caller in many processes: the quota is exceeded by no more than
// documented, and nothing deadlocks.
func TestQuota_HoldsForManyAtOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		const most, processes = 40, 3
		p.db.SetMaxOpenConns(16)
		var runs atomic.Int64
		var asking sync.WaitGroup
		for n := range processes {
			engine := p.engine(t, func(c *idempotency.Config) {
				c.Scope, c.Timeout = byUser, 2*time.Minute // a busy machine is no failure
				c.Keys.Quota = idempotency.Quota{Keys: most, Window: 31 * 24 * time.Hour}
			})
			handler := engine.TxMiddleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs.Add(1) }))
			for i := range most {
				asking.Go(func() {
					w := do(t, handler, post("/", "x", user("eve"), withKey(fmt.Sprint(n, "-", i))))
					for !t.Failed() && (w.Code == http.StatusServiceUnavailable || problemOf(w) == "in-progress") { // the machine is busy
						testserver.Pause(t.Context(), 20*time.Millisecond)
						w = do(t, handler, post("/", "x", user("eve"), withKey(fmt.Sprint(n, "-", i))))
					}
					if w.Code != http.StatusOK && w.Code != http.StatusTooManyRequests {
						t.Errorf("got %d %s", w.Code, w.Body)
					}
				})
			}
		}
		asking.Wait()
		if n := runs.Load(); n < most || n > most+processes*most/4 {
			t.Errorf("%d runs", n)
		}
	})
}

func TestQuota_BeginsAnewWithItsWindow(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Keys.Quota = idempotency.Quota{Keys: 1, Window: 2 * time.Second}
		})
		handler := engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		refused, n := 0, 0
		testserver.Eventually(t, "a request is refused, and a later one accepted", func() bool {
			n++
			switch w := do(t, handler, post("/", "x", withKey(strconv.Itoa(n)))); w.Code {
			case http.StatusTooManyRequests:
				refused++
			case http.StatusOK:
				return refused > 0
			}
			return false
		})
		testserver.Eventually(t, "the counts are purged", func() bool {
			if _, err := engine.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
			return p.count(t, `select count(*) from {{idempotency_usage}}`) == 0
		})
	})
}

func TestQuota_IsForCommandsToo(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) {
			c.Keys.Quota = idempotency.Quota{Keys: 1, Window: 31 * 24 * time.Hour}
			c.Keys.RateLimit = func(_ context.Context, scope idempotency.Scope) error {
				if scope.Principal == "fast" {
					return &idempotency.RateLimitError{Detail: "slower"}
				}
				return nil
			}
		})
		run := func(principal, key string) error {
			_, err := idempotency.Do(t.Context(), engine, idempotency.Command{Scope: idempotency.Scope{Principal: principal}, Name: "close", Key: key}, func(context.Context) (int, error) { return 1, nil })
			return err
		}
		if err := run("eve", "a"); err != nil {
			t.Error(err)
		}
		var over *idempotency.QuotaError
		if err := run("eve", "b"); !errors.As(err, &over) || over.RetryIn < time.Second {
			t.Errorf("got %v", err)
		}
		var limit *idempotency.RateLimitError
		if err := run("fast", "a"); !errors.As(err, &limit) || limit.Detail != "slower" {
			t.Errorf("got %v", err)
		}
	})
}

func TestQuota_NeedsAStoreThatCounts(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(struct{ idempotency.Store }{&idempotency.MemoryStore{}}, idempotency.Config{
		Scope: idempotency.SingleTenant(), Keys: idempotency.KeyConfig{Quota: idempotency.Quota{Keys: 1}},
	})
	if all := testserver.ConfigErrors(err); len(all) != 1 || all[0].Field != "idempotency.Config.Keys.Quota" {
		t.Errorf("got %v", err)
	}
	_, err = idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{
		Scope: idempotency.SingleTenant(), Keys: idempotency.KeyConfig{Quota: idempotency.Quota{Keys: -1, Bytes: -1, Window: time.Millisecond}},
	})
	if all := testserver.ConfigErrors(err); len(all) != 3 {
		t.Errorf("got %v", err)
	}
}

func TestRateLimit_RefusesBeforeTheClaim(t *testing.T) {
	t.Parallel()
	var limit error
	var routes []string
	store := &spy{Store: &idempotency.MemoryStore{}}
	engine := newEngine(t, store, func(c *idempotency.Config) {
		c.Keys.RateLimit = func(_ context.Context, scope idempotency.Scope) error {
			routes = append(routes, scope.Route)
			if limit == nil {
				panic("no limiter")
			}
			return limit
		}
	})
	runs := 0
	handler := engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs++ }))
	limit = &idempotency.RateLimitError{RetryAfter: 90 * time.Second, Detail: "10 orders a minute"}
	w := do(t, handler, post("/orders", "x"))
	expectProblem(t, w, http.StatusTooManyRequests, "rate-limited")
	if w.Header().Get("Retry-After") != "90" || !bytes.Contains(w.Body.Bytes(), []byte("10 orders a minute")) {
		t.Errorf("%v %s", w.Header(), w.Body)
	}
	limit = &idempotency.RateLimitError{}
	if w := do(t, handler, post("/orders", "x")); w.Header().Get("Retry-After") != "1" {
		t.Errorf("%v", w.Header())
	}
	limit = errors.New("the limiter is away")
	expectProblem(t, do(t, handler, post("/orders", "x")), http.StatusInternalServerError, "internal")
	limit = nil
	expectProblem(t, do(t, handler, post("/orders", "x")), http.StatusInternalServerError, "internal")
	if runs != 0 || store.last.Load() != nil || len(routes) != 4 || routes[0] != "/probe" {
		t.Errorf("%d runs, claim %v, routes %q", runs, store.last.Load(), routes)
	}
}

// slowCounts takes longer to count than claims wait for a count.
type slowCounts struct{ idempotency.MemoryStore }

func (s *slowCounts) AddUsage(ctx context.Context, caller idempotency.Caller, window time.Duration, keys, bytes int64) (idempotency.Usage, error) {
	time.Sleep(150 * time.Millisecond)
	return s.MemoryStore.AddUsage(ctx, caller, window, keys, bytes)
}

func (s *slowCounts) Outstanding(ctx context.Context, caller idempotency.Caller, limit int) (int, error) {
	time.Sleep(150 * time.Millisecond)
	return s.MemoryStore.Outstanding(ctx, caller, limit)
}

// A database that is slow makes a caller's claims as slow as itself, and not ten a second.
func TestLimits_OfASlowStoreSlowNobodyDownFurther(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(c *idempotency.Config){
		"outstanding": func(*idempotency.Config) {},
		"quota": func(c *idempotency.Config) {
			c.Keys.MaxOutstanding = idempotency.Unlimited
			c.Keys.Quota = idempotency.Quota{Keys: 10_000}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handler := newEngine(t, &slowCounts{}, set).Middleware(ok("ran"))
			var asking sync.WaitGroup
			began := time.Now()
			for i := range 60 {
				asking.Go(func() {
					if w := do(t, handler, post("/", "x", withKey(strconv.Itoa(i)))); w.Code != http.StatusOK {
						t.Errorf("%d %s", w.Code, w.Body)
					}
				})
			}
			asking.Wait()
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("60 claims took %s", took)
			}
		})
	}
}

// What a process has not yet taken back refuses nobody elsewhere.
func TestQuota_ARefusalIsTakenBackAtOnce(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		fails := true
		var handlers []http.Handler
		for range 3 {
			handlers = append(handlers, newEngine(t, store, func(c *idempotency.Config) {
				c.Keys.Quota = idempotency.Quota{Keys: 1, Window: 31 * 24 * time.Hour}
			}).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if fails {
					w.WriteHeader(http.StatusForbidden) // releases the key
				}
			})))
		}
		do(t, handlers[0], post("/", "x"))
		fails = false
		for _, handler := range handlers[1:] { // the first process has not yet said that it failed
			expectProblem(t, do(t, handler, post("/", "x")), http.StatusTooManyRequests, "over-quota")
		}
		if w := do(t, handlers[0], post("/", "x")); w.Code != http.StatusOK {
			t.Errorf("the caller has no key, and got %d %s", w.Code, w.Body)
		}
	})
}

// lateUsage is a store that answers late what a caller has taken.
type lateUsage struct {
	idempotency.QuotaStore
	late atomic.Bool
}

func (s *lateUsage) AddUsage(ctx context.Context, caller idempotency.Caller, window time.Duration, keys, bytes int64) (idempotency.Usage, error) {
	usage, err := s.QuotaStore.AddUsage(ctx, caller, window, keys, bytes)
	if s.late.Load() {
		time.Sleep(time.Second)
	}
	return usage, err
}

// What was taken in a window that has ended does not count in a later one.
func TestQuota_NothingIsCarriedIntoALaterWindow(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		const most, window = 40, 5 * time.Second
		slow := &lateUsage{QuotaStore: store.(idempotency.QuotaStore)}
		handler := newEngine(t, slow, func(c *idempotency.Config) {
			c.Keys.Quota = idempotency.Quota{Keys: most, Window: window}
		}).Middleware(ok("ran"))
		accepted := func(prefix string) (n int) {
			for i := range 2 * most {
				if w := do(t, handler, post("/", "x", withKey(fmt.Sprint(prefix, i)))); w.Code == http.StatusOK {
					n++
				}
				if prefix == "first" && i == most/4-1 { // the last of them are not yet added
					break
				}
			}
			return n
		}
		next := func() { time.Sleep(time.Until(time.Now().Truncate(window).Add(window + 50*time.Millisecond))) }
		next()
		slow.late.Store(true) // the answer says when the window ends
		accepted("first")
		slow.late.Store(false)
		next()
		if n := accepted("second"); n < most {
			t.Errorf("%d of %d keys in a new window", n, most)
		}
	})
}

// A limiter that is too slow has not failed: the client may come again.
func TestRateLimit_RunsInTheTimeOfTheRequest(t *testing.T) {
	t.Parallel()
	for name, result := range map[string]func(context.Context) error{
		"it notices":     context.Context.Err,
		"it does not":    func(context.Context) error { return nil },
		"it still knows": func(context.Context) error { return &idempotency.RateLimitError{RetryAfter: -time.Minute} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &spy{Store: &idempotency.MemoryStore{}}
			handler := newEngine(t, store, func(c *idempotency.Config) {
				c.Timeout = 20 * time.Millisecond
				c.Keys.RateLimit = func(ctx context.Context, _ idempotency.Scope) error {
					<-ctx.Done()
					return result(ctx)
				}
			}).Middleware(ok("ran"))
			w := do(t, handler, post("/", "x"))
			if name == "it still knows" {
				expectProblem(t, w, http.StatusTooManyRequests, "rate-limited")
			} else {
				expectProblem(t, w, http.StatusServiceUnavailable, "execution-timeout")
			}
			if w.Header().Get("Retry-After") != "1" || store.last.Load() != nil {
				t.Errorf("%v, claimed %v", w.Header(), store.last.Load())
			}
		})
	}
}
