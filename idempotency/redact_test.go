package idempotency_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// secretive is a handler whose response has a secret in its body and its headers.
func secretive(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("Location", "/orders/7")
	w.Header().Set("X-Token", "hunter2")
	w.Header().Add("Vary", "Origin")
	w.Header().Set("Set-Cookie", "session=hunter2")
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write([]byte("card 4111"))
}

func TestResponses_StoresOnlyTheHeadersToKeep(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) {
			c.Responses.KeepHeaders = []string{"content-type", "location", "set-cookie", "vary"}
			c.Responses.DropHeaders = []string{"Location"}
		})
		handler := engine.Middleware(http.HandlerFunc(secretive))
		if w := do(t, handler, post("/", "x")); w.Header().Get("X-Token") != "hunter2" || w.Header().Get("Location") != "/orders/7" {
			t.Errorf("the first client: %v", w.Header())
		}
		w := do(t, handler, post("/", "x"))
		if h := w.Header(); h.Get("Content-Type") != "text/plain" || h.Get("Vary") != "Origin" || h.Get("Location") != "" || h.Get("X-Token") != "" || h.Get("Set-Cookie") != "" || w.Body.String() != "card 4111" {
			t.Errorf("a retry: %v %s", h, w.Body)
		}
	})
}

// An answer that asks for a retry is not stored, whatever headers are kept.
func TestResponses_KeepsNoRetryAfterWhereItIsNotKept(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Responses.KeepHeaders = []string{"Content-Type"}
		c.Responses.DropHeaders = []string{"Retry-After"}
	})
	runs := 0
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		runs++
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusConflict)
	}))
	do(t, handler, post("/", "x"))
	do(t, handler, post("/", "x"))
	if runs != 2 {
		t.Errorf("%d runs", runs)
	}
}

func TestResponses_RedactsWhatIsStoredAndNotWhatIsSent(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Responses.Redact = func(r *http.Request, a *idempotency.Answer) error {
				if r.URL.Path != "/" || a.Status != http.StatusCreated || a.Header.Get("Set-Cookie") != "" {
					t.Errorf("%s: %+v", r.URL.Path, a)
				}
				a.Status = 500
				a.Header.Del("X-Token")
				a.Header.Set("location", "/orders/x")
				a.Header.Set("X-Redacted", "yes")
				a.Header.Set("Set-Cookie", "a=b")
				copy(a.Body, "CARD xxxx")
				return nil
			}
		})
		handler := engine.TxMiddleware(http.HandlerFunc(secretive))
		outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Vary", "Accept")
			handler.ServeHTTP(w, r)
		})
		if w := do(t, outer, post("/", "x")); w.Code != 201 || w.Body.String() != "card 4111" || w.Header().Get("X-Token") != "hunter2" || w.Header().Get("X-Redacted") != "" {
			t.Errorf("the first client: %d %v %s", w.Code, w.Header(), w.Body)
		}
		w := do(t, outer, post("/", "x"))
		if h := w.Header(); w.Code != 201 || w.Body.String() != "CARD xxxx" || h.Get("X-Token") != "" || h.Get("Location") != "/orders/x" || h.Get("X-Redacted") != "yes" || h.Get("Set-Cookie") != "" || len(h["Vary"]) != 2 {
			t.Errorf("a retry: %d %v %s", w.Code, h, w.Body)
		}
		if n := p.count(t, `select count(*) from {{idempotency}} where location = '/orders/x'`); n != 1 {
			t.Errorf("%d records have the redacted location", n)
		}
	})
}

// If the redaction fails, nothing of the answer is stored, and the handler does not run again.
func TestResponses_StoresNothingThatCouldNotBeRedacted(t *testing.T) {
	t.Parallel()
	for name, redact := range map[string]func(*http.Request, *idempotency.Answer) error{
		"error": func(*http.Request, *idempotency.Answer) error { return errors.New("no rules") },
		"panic": func(*http.Request, *idempotency.Answer) error { panic("no rules") },
		"too large": func(_ *http.Request, a *idempotency.Answer) error {
			a.Body = []byte(strings.Repeat("x", 1<<20+1))
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Responses.Redact = redact })
			handler := engine.Middleware(http.HandlerFunc(secretive))
			if w := do(t, handler, post("/", "x")); w.Code != 201 || w.Body.String() != "card 4111" {
				t.Errorf("the first client: %d %s", w.Code, w.Body)
			}
			w := do(t, handler, post("/", "x"))
			expectProblem(t, w, http.StatusConflict, "response-not-stored")
			if w.Header().Get("Location") != "" {
				t.Errorf("stored: %v", w.Header())
			}
		})
	}
}

// What the redaction does not see is not stored either.
func TestResponses_StoresNothingUnredacted(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Responses.MaxSize = 10
			c.Responses.Redact = func(_ *http.Request, a *idempotency.Answer) error {
				a.Header.Del("Location")
				return nil
			}
		})
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "/download?token=hunter2")
			w.Header().Set("Trailer", "X-Token")
			_, _ = w.Write([]byte(r.URL.Query().Get("body")))
			w.Header().Set("X-Token", "hunter2")
		}))
		do(t, handler, post("/?body="+strings.Repeat("x", 11), "x", withKey("large")))
		if n := p.count(t, `select count(*) from {{idempotency}} where state = 3 and location is null`); n != 1 {
			t.Error("the location of a large answer is stored as the handler wrote it")
		}
		do(t, handler, post("/?body=small", "x", withKey("small")))
		w := do(t, handler, post("/?body=small", "x", withKey("small")))
		if w.Header().Get("Idempotency-Replayed") != "true" || w.Body.String() != "small" || w.Result().Trailer.Get("X-Token") != "" {
			t.Errorf("%v, trailer %v", w.Header(), w.Result().Trailer)
		}
	})
}

// Rules for headers find names that are not in canonical form.
func TestResponses_FindsHeadersInAnyCase(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*idempotency.ResponseConfig){
		"drop": func(c *idempotency.ResponseConfig) { c.DropHeaders = []string{"X-Token"} },
		"keep": func(c *idempotency.ResponseConfig) { c.KeepHeaders = []string{"Location", "Set-Cookie"} },
		"redact": func(c *idempotency.ResponseConfig) {
			c.Redact = func(_ *http.Request, a *idempotency.Answer) error {
				a.Header.Del("X-Token")
				return nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { set(&c.Responses) })
			handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				for name, value := range map[string]string{"set-cookie": "session=hunter2", "x-token": "hunter2", "location": "/orders/7"} {
					w.Header()[name] = []string{value}
				}
				w.WriteHeader(http.StatusCreated)
			}))
			if w := do(t, handler, post("/", "x")); len(w.Header()) != 3 {
				t.Errorf("the first client: %v", w.Header())
			}
			if h := do(t, handler, post("/", "x")).Header(); h.Get("Location") != "/orders/7" || len(h) != 2 {
				t.Errorf("a retry: %v", h)
			}
		})
	}
}
