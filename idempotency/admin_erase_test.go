package idempotency_test

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

func TestAdmin_ErasesAScopeAndNothingElse(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		cache := &removableCache{memoryCache: newMemoryCache()}
		admin := p.admin(t, idempotency.AdminConfig{Cache: cache})
		var runs atomic.Int64
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Responses.Cache = cache
			c.Scope = func(r *http.Request) (idempotency.Scope, error) {
				return idempotency.Scope{Tenant: "t", Principal: r.Header.Get("User")}, nil
			}
		})
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			runs.Add(1)
			w.Header().Set("Location", "/of/eve")
			_, _ = w.Write([]byte(strings.Repeat("x", 100_000))) // a large one has a row of its own
		}))
		user := func(name string) func(*http.Request) {
			return func(r *http.Request) { r.Header.Set("User", name) }
		}
		for _, name := range []string{"eve", "bob"} {
			for _, key := range []string{"a", "b", "c"} {
				do(t, handler, post("/", "x", withKey(key), user(name)))
			}
		}
		eve := admin.CallerOf(idempotency.Scope{Tenant: "t", Principal: "eve"})
		if _, err := admin.Erase(t.Context(), eve, idempotency.Act{By: "ada"}); !errors.Is(err, idempotency.ErrNoReason) {
			t.Errorf("without a reason: %v", err)
		}
		cache.err.Store(true)
		if _, err := admin.Erase(t.Context(), eve, byAda); err == nil || p.count(t, `select count(*) from {{idempotency}}`) != 6 {
			t.Errorf("the cache was not reached: %v", err)
		}
		cache.err.Store(false)
		done, err := admin.Erase(t.Context(), eve, byAda)
		if err != nil || done != (idempotency.Erased{Keys: 3}) {
			t.Errorf("%+v, %v", done, err)
		}
		if n, bodies := p.count(t, `select count(*) from {{idempotency}}`), p.count(t, `select count(*) from {{idempotency_body}}`); n != 3 || bodies != 3 {
			t.Errorf("left %d keys, %d bodies", n, bodies)
		}
		before := runs.Load()
		do(t, handler, post("/", "x", withKey("a"), user("bob")))
		if runs.Load() != before {
			t.Error("bob's key runs again")
		}
		if w := do(t, handler, post("/", "x", withKey("a"), user("eve"))); w.Header().Get("Idempotency-Replayed") != "" || runs.Load() != before+1 {
			t.Errorf("eve's key: %v, %d runs", w.Header(), runs.Load()-before)
		}
		for _, e := range p.audited(t) {
			if whole := e.Subject + e.Details + e.Reason; strings.Contains(whole, "eve") || strings.Contains(whole, hex.EncodeToString(eve[:8])) || e.Action != "idempotency_scope.erase" {
				t.Errorf("%+v", e)
			}
		}
		if entries := p.audited(t); len(entries) != 2 {
			t.Errorf("%+v", entries)
		}
	})
}

// Requests that come while a scope is erased have one effect each, and what they store
// afterwards is whole. A running key is left and counted.
func TestAdmin_ErasesWhileRequestsCome(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		effects := p.effects(t)
		engine := p.engine(t, nil)
		holding, hold := make(chan struct{}), make(chan struct{})
		var once sync.Once
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/held" {
				once.Do(func() { close(holding) })
				<-hold
			}
			if err := effects.Add(r.Context(), r.URL.Path); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}))
		var answering sync.WaitGroup
		answering.Go(func() {
			if w := do(t, handler, post("/held", "x", withKey("held"))); w.Code != 200 {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
		<-holding
		caller := onlyKey(t, admin, idempotency.Filter{}).Caller
		stop := make(chan struct{})
		for i := range 4 {
			answering.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
						do(t, handler, post("/x", "x", withKey(string(rune('a'+i))+time.Now().String())))
					}
				}
			})
		}
		for range 5 {
			done, err := admin.Erase(t.Context(), caller, byAda)
			if err != nil || done.Left == 0 {
				t.Errorf("%+v, %v", done, err)
			}
		}
		close(stop)
		close(hold)
		answering.Wait()
		if w := do(t, handler, post("/held", "x", withKey("held"))); w.Header().Get("Idempotency-Replayed") != "true" {
			t.Errorf("the running key was erased: %d %v", w.Code, w.Header())
		}
		if done, err := admin.Erase(t.Context(), caller, byAda); err != nil || done.Left != 0 || p.count(t, `select count(*) from {{idempotency}}`) != 0 {
			t.Errorf("%+v, %v", done, err)
		}
	})
}

// memoryCache is a cache that cannot remove.
type memoryCache struct {
	mu      sync.Mutex
	records map[idempotency.ID]idempotency.Record
}

func (c *memoryCache) Get(_ context.Context, id idempotency.ID) (idempotency.Record, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, ok := c.records[id]
	return r, ok
}

func (c *memoryCache) Put(_ context.Context, r idempotency.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records[r.ID] = r
}

func newMemoryCache() *memoryCache {
	return &memoryCache{records: map[idempotency.ID]idempotency.Record{}}
}

// removableCache can remove, and fails on demand.
type removableCache struct {
	*memoryCache
	err atomic.Bool
}

func (c *removableCache) Remove(_ context.Context, ids []idempotency.ID) error {
	if c.err.Load() {
		return errors.New("no cache")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		delete(c.records, id)
	}
	return nil
}
