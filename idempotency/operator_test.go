package idempotency_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// An operator settles a key with an unknown outcome, once.
func TestEngine_SettlesAnUnknownOutcome(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, struct{ idempotency.Store }{store}, func(c *idempotency.Config) { c.Answers.StatusPath = "/status/" })
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

// A recovery that cannot be sent to a client is refused, and leaves the key as it was.
func TestEngine_RefusesToSettleWithWhatIsNoAnswer(t *testing.T) {
	t.Parallel()
	store := &spy{Store: &idempotency.MemoryStore{}}
	small := func(c *idempotency.Config) { c.Responses.MaxSize = 10 }
	engine := newEngine(t, store, small)
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
	do(t, handler, post("/", "x"))
	request := store.last.Load().ID.Token()
	cmd := idempotency.Command{Name: "charge", Key: "a"}
	command := func() (string, error) {
		r, err := idempotency.Do(t.Context(), engine, cmd, func(context.Context) (string, error) { return "", errHandler })
		return r.Value, err
	}
	_, _ = command()
	ofCommand := store.last.Load().ID.Token()
	large := strings.Repeat("x", 11)
	for _, c := range []struct {
		field, token string
		found        idempotency.Recovery
	}{
		{"Status", request, idempotency.Recovery{Status: -1}},
		{"Status", request, idempotency.Recovery{Status: 103}},
		{"Status", request, idempotency.Recovery{Status: 600}},
		{"Body", request, idempotency.Recovery{Status: 200, Body: []byte(large)}},
		{"Body", request, idempotency.Recovery{Status: 204, Body: []byte("x")}},
		{"Header", request, idempotency.Recovery{Status: 200, Header: http.Header{"A": {strings.Repeat("x", 40<<10), strings.Repeat("x", 40<<10)}}}},
		{"Header", request, idempotency.Recovery{Status: 200, Header: http.Header{"A b": {"x"}}}},
		{"Header", request, idempotency.Recovery{Status: 200, Header: http.Header{"A": {"x\r\nSet-Cookie: a=b"}}}},
		{"Body", ofCommand, idempotency.Recovery{Status: 200}},
		{"Body", ofCommand, idempotency.Recovery{Status: 200, Body: []byte(`charged`)}},
	} {
		var wrong *idempotency.RecoveryError
		if err := engine.Settle(t.Context(), c.token, c.found); !errors.As(err, &wrong) || wrong.Field != c.field {
			t.Errorf("%s of a %d: %v", c.field, c.found.Status, err)
		}
	}
	expectProblem(t, do(t, handler, post("/", "x")), http.StatusConflict, "outcome-unknown")
	if err := engine.Settle(t.Context(), request, idempotency.Recovery{Status: 204, Header: http.Header{"Set-Cookie": {"a=b"}, "Content-Length": {"7"}, "Etag": {"1"}}}); err != nil {
		t.Error(err)
	}
	if w := do(t, handler, post("/", "x")); w.Code != 204 || w.Header().Get("Etag") != "1" || w.Header().Get("Set-Cookie")+w.Header().Get("Content-Length") != "" {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	if err := engine.Settle(t.Context(), ofCommand, idempotency.Recovery{Status: 200, Body: []byte(`"charged twice"`)}); err != nil {
		t.Error(err) // it may be of Engine.Watermill, which knows no MaxResponse
	}
	if v, err := command(); err != nil || v != "charged twice" {
		t.Error(v, err)
	}
}

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
