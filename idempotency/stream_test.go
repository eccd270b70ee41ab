package idempotency_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// A streamed response is not replayed, and its status means what any other's does.
func TestMiddleware_AStreamedFailureIsNoSuccess(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status   int
		noEffect bool
		failed   idempotency.FailurePolicy
		problem  string // of the next one; empty: it runs
	}{
		"success":            {status: 201, problem: "response-not-stored"},
		"failure":            {status: 500, problem: "outcome-unknown"},
		"without effect":     {status: 500, noEffect: true},
		"released":           {status: 500, failed: idempotency.FailedRelease},
		"refused":            {status: 422, problem: "response-not-stored"},
		"refused for a time": {status: 429},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			engine := newEngine(t, &idempotency.MemoryStore{}, func(cfg *idempotency.Config) { cfg.Responses.AllowStreaming, cfg.Failures.Failed = true, c.failed })
			runs := 0
			handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				runs++
				w.WriteHeader(c.status)
				w.(http.Flusher).Flush()
				if c.noEffect {
					idempotency.NoEffect(r.Context())
				}
				_, _ = io.WriteString(w, "body")
			}))
			if w := do(t, handler, post("/", "x")); w.Code != c.status || w.Body.String() != "body" {
				t.Errorf("%d %s", w.Code, w.Body)
			}
			w := do(t, handler, post("/", "x"))
			if c.problem != "" {
				expectProblem(t, w, 409, c.problem)
			}
			if want := map[bool]int{true: 2, false: 1}[c.problem == ""]; runs != want {
				t.Errorf("%d runs, want %d", runs, want)
			}
		})
	}
}

// Nothing is written after a stream, neither when the claim was lost nor after a timeout; a
// panic then closes the connection.
func TestMiddleware_NothingFollowsAStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		late, panics bool
	}{"claim lost": {}, "late": {late: true}, "late panic": {late: true, panics: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &spy{Store: &idempotency.MemoryStore{}}
			engine := newEngine(t, store, func(cfg *idempotency.Config) {
				cfg.Responses.AllowStreaming = true
				if c.late {
					cfg.Timeout = 50 * time.Millisecond
				}
			})
			handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Trailer", "X-Sum")
				_, _ = io.WriteString(w, "all")
				w.(http.Flusher).Flush()
				if c.late {
					<-r.Context().Done()
				} else if last := store.last.Load(); store.Release(r.Context(), last.ID, last.Owner) != nil {
					t.Error("not released")
				}
				if c.panics {
					panic(http.ErrAbortHandler)
				}
				w.Header().Set("X-Sum", "3")
			}))
			w := httptest.NewRecorder()
			panicked := func() (p bool) {
				defer func() { p = recover() != nil }()
				handler.ServeHTTP(w, post("/", "x"))
				return false
			}()
			if w.Body.String() != "all" || panicked != c.panics || !c.panics && w.Result().Trailer.Get("X-Sum") != "3" {
				t.Errorf("%q, trailer %v, panicked %t", w.Body, w.Result().Trailer, panicked)
			}
		})
	}
}

func TestMiddleware_StreamsIfAllowed(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Responses.AllowStreaming = true })
	var flushed string
	var w *httptest.ResponseRecorder
	handler := engine.Middleware(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(rw, "one")
		rw.(http.Flusher).Flush()
		flushed = w.Body.String()
		_, _ = io.WriteString(rw, "two")
	}))
	w = httptest.NewRecorder()
	handler.ServeHTTP(w, post("/", "x"))
	if flushed != "one" || w.Body.String() != "onetwo" {
		t.Errorf("flushed %q, then %q", flushed, w.Body)
	}
	expectProblem(t, do(t, handler, post("/", "x")), 409, "response-not-stored")
	recorded := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		if err := http.NewResponseController(rw).Flush(); !errors.Is(err, idempotency.ErrStreaming) {
			t.Errorf("Flush: %v", err)
		}
		if _, _, err := http.NewResponseController(rw).Hijack(); !errors.Is(err, idempotency.ErrHijack) {
			t.Errorf("Hijack: %v", err)
		}
		if _, ok := rw.(http.Flusher); ok {
			t.Error("it is an http.Flusher that cannot flush")
		}
	}))
	do(t, recorded, post("/", "x"))
}
