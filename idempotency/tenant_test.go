package idempotency_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// Two tenants may use the same key, for the same command, as the same principal.
func TestDo_KeepsTenantsApart(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) { c.Keys.MaxOutstanding = 1 })
		call := func(tenant string, fn func(context.Context) (string, error)) (idempotency.Result[string], error) {
			scope := idempotency.Scope{Tenant: tenant, Principal: "user"}
			return idempotency.Do(t.Context(), engine, idempotency.Command{Name: "close", Key: "key", Scope: scope}, fn)
		}
		own := func(tenant string) {
			t.Helper()
			r, err := call(tenant, func(context.Context) (string, error) { return "of " + tenant, nil })
			if err != nil || r.Value != "of "+tenant {
				t.Errorf("%s: %+v %v", tenant, r, err)
			}
		}
		own("a")
		own("b")
		own("a")
	})
}

// The same for requests: each tenant has an answer of its own.
func TestMiddleware_KeepsTenantsApart(t *testing.T) {
	t.Parallel()
	handler := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "of "+r.Header.Get("X-Tenant"))
	}))
	for _, tenant := range []string{"a", "b", "a"} {
		w := do(t, handler, post("/", "x", func(r *http.Request) {
			r.Header.Set("X-Tenant", tenant)
			r.Header.Set("X-User", "user")
		}))
		if w.Body.String() != "of "+tenant {
			t.Errorf("%s: %d %s", tenant, w.Code, w.Body)
		}
	}
}

// What one tenant has outstanding is no other tenant's limit.
func TestDo_LimitsEachTenant(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, struct{ idempotency.Store }{store}, func(c *idempotency.Config) { c.Keys.MaxOutstanding = 1 })
		call := func(tenant, key string, fn func(context.Context) (int, error)) error {
			scope := idempotency.Scope{Tenant: tenant, Principal: "user"}
			_, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "close", Key: key, Scope: scope}, fn)
			return err
		}
		nothing := func(context.Context) (int, error) { return 0, nil }
		err := call("a", "first", func(context.Context) (int, error) {
			if err := call("a", "second", nothing); !errors.Is(err, idempotency.ErrTooManyOutstanding) {
				t.Errorf("the same tenant: %v", err)
			}
			if err := call("b", "second", nothing); err != nil {
				t.Errorf("another tenant: %v", err)
			}
			return 0, nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// A caller sees the state of its own keys, and of no other tenant's.
func TestStatus_IsTheTenantsOwn(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Answers.StatusPath, c.Answers.InProgress = "/status/", idempotency.InProgressAccepted
	})
	as := func(tenant string) func(*http.Request) {
		return func(r *http.Request) {
			r.Header.Set("X-Tenant", tenant)
			r.Header.Set("X-User", "user")
		}
	}
	look := func(path, tenant string) int {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		as(tenant)(r)
		return do(t, engine.StatusHandler(), r).Code
	}
	var handler http.Handler
	handler = engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		path := do(t, handler, post("/", "x", as("a"))).Header().Get("Location") // of a copy
		if code := look(path, "a"); code != http.StatusOK {
			t.Errorf("%q is answered with %d", path, code)
		}
		if code := look(path, "b"); code != http.StatusNotFound {
			t.Errorf("another tenant's is answered with %d", code)
		}
	}))
	if w := do(t, handler, post("/", "x", as("a"))); w.Code != http.StatusOK {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// Nobody may take a key for absent, and send the request again, because the caller could not
// be looked up.
func TestStatus_SaysThatTheScopeFailed(t *testing.T) {
	t.Parallel()
	var scopeErr error
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Scope = func(*http.Request) (idempotency.Scope, error) {
			return idempotency.Scope{Tenant: "a"}, scopeErr
		}
		c.Answers.StatusPath, c.Answers.InProgress = "/status/", idempotency.InProgressAccepted
	})
	var handler http.Handler
	handler = engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		path := do(t, handler, post("/", "x")).Header().Get("Location") // of a copy
		for err, want := range map[error]int{nil: http.StatusOK, errors.New("no answer"): http.StatusInternalServerError, &idempotency.ScopeError{}: http.StatusNotFound} {
			scopeErr = err
			if code := do(t, engine.StatusHandler(), httptest.NewRequest(http.MethodGet, path, nil)).Code; code != want {
				t.Errorf("scope %v: %d, want %d", err, code, want)
			}
		}
		scopeErr = nil
	}))
	do(t, handler, post("/", "x"))
}
