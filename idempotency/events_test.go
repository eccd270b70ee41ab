package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// awayStore cannot be reached for a while.
type awayStore struct {
	idempotency.Store
	away atomic.Bool
}

var errAway = errors.New("connection refused")

func (s *awayStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	if s.away.Load() {
		return idempotency.Record{}, false, errAway
	}
	return s.Store.Claim(ctx, c)
}

func (s *awayStore) Outstanding(ctx context.Context, caller idempotency.Caller, most int) (int, error) {
	if s.away.Load() {
		return 0, errAway
	}
	return s.Store.Outstanding(ctx, caller, most)
}

// An hour without the store, with ten requests a second, is a dozen lines.
func TestMiddleware_LogsAnOutageInADozenLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		store := &awayStore{Store: &idempotency.MemoryStore{}}
		engine := newEngine(t, store, func(c *idempotency.Config) {
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c.Timeout = 100 * time.Millisecond
		})
		handler := engine.Middleware(ok("done"))
		store.away.Store(true)
		for range 36_000 {
			expectProblem(t, do(t, handler, post("/", "x")), http.StatusServiceUnavailable, "store-unavailable")
			if t.Failed() {
				t.FailNow()
			}
			time.Sleep(100 * time.Millisecond)
		}
		store.away.Store(false)
		do(t, handler, post("/", "x"))
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) < 5 || len(lines) > 12 {
			t.Errorf("%d lines: %s", len(lines), log.String())
		}
		if first := lines[0]; !strings.Contains(first, `level=ERROR msg="idempotency store unavailable"`) {
			t.Errorf("first: %s", first)
		}
		if last := lines[len(lines)-1]; !strings.Contains(last, `level=INFO msg="idempotency store available again" failures=36000 lasted=1h`) {
			t.Errorf("last: %s", last)
		}
	})
}

// Every line of a request has what it is found by.
func TestMiddleware_LogsWhatARequestIsFoundBy(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		c.Telemetry.TenantAttribute = true
	})
	handler := engine.Middleware(ok("done"))
	as := func(r *http.Request) { r.Header.Set("X-Tenant", "acme") }
	do(t, handler, post("/", "x", as))
	do(t, handler, post("/", "x", as))
	do(t, handler, post("/", "y", as))
	for _, event := range []string{"idempotency key received", "new request processing", "request completed", "cached response returned", "key reused with another request"} {
		if !strings.Contains(log.String(), `level=DEBUG msg="`+event+`"`) {
			t.Errorf("no event %q in %s", event, log.String())
		}
	}
	for line := range strings.Lines(log.String()) {
		for _, attr := range []string{" key_hash=", " endpoint=", " request_hash=", " tenant=acme"} {
			if !strings.Contains(line, attr) {
				t.Errorf("no%s in %s", attr, line)
			}
		}
	}
}

// A scope that cannot be found, for example because the session store is away, is a dozen lines.
func TestMiddleware_LogsFailingScopesInADozenLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c.Scope = func(*http.Request) (idempotency.Scope, error) { return idempotency.Scope{}, errAway }
		})
		handler := engine.Middleware(ok("done"))
		for range 3600 {
			if got := do(t, handler, post("/", "x")); got.Code != http.StatusInternalServerError {
				t.Fatalf("status %d", got.Code)
			}
			time.Sleep(time.Second)
		}
		if n := strings.Count(log.String(), `level=ERROR msg="idempotency scope failed"`); n < 5 || n > 12 || n != strings.Count(log.String(), "\n") {
			t.Errorf("%d lines: %s", n, log.String())
		}
	})
}

// A client that sends empty bodies as JSON, chunked, each of which looks like one that was read
// before, causes a dozen lines.
func TestMiddleware_LogsEmptyBodiesInADozenLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		})
		handler := engine.Middleware(ok("done"))
		for range 3600 {
			empty := post("/", "", typed("application/json"), func(r *http.Request) {
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader("")), -1
			})
			expectProblem(t, do(t, handler, empty), http.StatusInternalServerError, "internal")
			time.Sleep(time.Second)
		}
		if n := strings.Count(log.String(), `level=ERROR msg="request body was read before the idempotency middleware"`); n < 5 || n > 12 || n != strings.Count(log.String(), "\n") {
			t.Errorf("%d lines", n)
		}
	})
}
