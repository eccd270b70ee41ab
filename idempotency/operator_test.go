package idempotency_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// An operator who has found out settles a key, once.
func TestEngine_SettlesAnUnknownOutcome(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, struct{ idempotency.Store }{store}, func(c *idempotency.Config) { c.StatusPath = "/status/" })
		runs := 0
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if runs++; runs == 1 {
				w.WriteHeader(http.StatusBadGateway)
			}
		}))
		token := func(key string) string {
			t.Helper()
			w := do(t, handler, post("/", "x", withKey(key)))
			expectProblem(t, w, http.StatusConflict, "outcome-unknown")
			var p struct {
				URL string `json:"status_url"`
			}
			if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
				t.Fatal(err)
			}
			return path.Base(p.URL)
		}
		do(t, handler, post("/", "x", withKey("a")))
		a := token("a")
		if err := engine.Settle(t.Context(), a, idempotency.Recovery{}); !errors.Is(err, idempotency.ErrNotUnknown) {
			t.Errorf("nothing was found out: %v", err)
		}
		found := idempotency.Recovery{Status: 201, Header: http.Header{"Location": {"/orders/7"}}, Body: []byte("made")}
		var settled atomic.Int64
		var settling sync.WaitGroup
		for range 5 {
			settling.Go(func() {
				switch err := engine.Settle(t.Context(), a, found); {
				case err == nil:
					settled.Add(1)
				case !errors.Is(err, idempotency.ErrNotUnknown):
					t.Error(err)
				}
			})
		}
		settling.Wait()
		w := do(t, handler, post("/", "x", withKey("a")))
		if settled.Load() != 1 || w.Code != 201 || w.Body.String() != "made" || w.Header().Get("Location") != "/orders/7" || runs != 1 {
			t.Errorf("settled %d times, then %d %q, %d runs", settled.Load(), w.Code, w.Body, runs)
		}
		runs = 0
		do(t, handler, post("/", "x", withKey("b")))
		if err := engine.Settle(t.Context(), token("b"), idempotency.Recovery{RunAgain: true}); err != nil {
			t.Error(err)
		}
		if w := do(t, handler, post("/", "x", withKey("b"))); w.Code != http.StatusOK || runs != 2 {
			t.Errorf("released: %d, %d runs", w.Code, runs)
		}
		for _, nobodys := range []string{"", "a", a, token2(a)} {
			if err := engine.Settle(t.Context(), nobodys, found); !errors.Is(err, idempotency.ErrNotUnknown) {
				t.Errorf("%q: %v", nobodys, err)
			}
		}
	})
}

// token2 is another token of the same length.
func token2(token string) string { return "A" + token[1:len(token)-1] + "A" }

func TestEngine_SettlesACommand(t *testing.T) {
	t.Parallel()
	store := &spy{Store: &idempotency.MemoryStore{}}
	engine := newEngine(t, store, nil)
	command := func() (idempotency.Result[string], error) {
		return idempotency.Do(t.Context(), engine, idempotency.Command{Name: "charge", Key: "a"}, func(context.Context) (string, error) { return "", errHandler })
	}
	if _, err := command(); !errors.Is(err, idempotency.ErrOutcomeUnknown) {
		t.Error(err)
	}
	if err := engine.Settle(t.Context(), store.last.Load().ID.Token(), idempotency.Recovery{Status: 200, Body: []byte(`"charged"`)}); err != nil {
		t.Error(err)
	}
	if r, err := command(); err != nil || r.Value != "charged" || !r.Replayed {
		t.Errorf("%+v %v", r, err)
	}
}
