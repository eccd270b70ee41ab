package idempotency_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

func post(path, body string, change ...func(*http.Request)) *http.Request {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Idempotency-Key", "key")
	for _, c := range change {
		c(r)
	}
	return r
}

func withKey(key string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Idempotency-Key", key) }
}

func withoutKey(r *http.Request) { r.Header.Del("Idempotency-Key") }

func do(t *testing.T, h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func problemOf(w *httptest.ResponseRecorder) string {
	var p struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal(w.Body.Bytes(), &p)
	return p.Type[strings.LastIndexByte(p.Type, '#')+1:]
}

func expectProblem(t *testing.T, w *httptest.ResponseRecorder, status int, kind string) {
	t.Helper()
	if w.Code != status || problemOf(w) != kind {
		t.Errorf("got %d %s, want %d %s", w.Code, w.Body, status, kind)
	}
}

// expectReason expects a key to be refused for a reason that the client is told.
func expectReason(t *testing.T, w *httptest.ResponseRecorder, kind, reason string) {
	t.Helper()
	expectProblem(t, w, http.StatusBadRequest, kind)
	if !strings.Contains(w.Body.String(), reason) {
		t.Errorf("got %s, want %q", w.Body, reason)
	}
}

func ok(body string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
}

func TestNew_ReportsAllBadValuesAtOnce(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{
		Timeout:   time.Minute,
		Keys:      idempotency.KeyConfig{Header: "a b", Methods: []string{"GET"}},
		Failures:  idempotency.FailureConfig{Lease: time.Minute},
		Requests:  idempotency.RequestConfig{MaxBody: -1},
		Answers:   idempotency.AnswerConfig{InProgress: idempotency.InProgressAccepted, ReusedStatus: 400},
		Responses: idempotency.ResponseConfig{Encryption: &idempotency.Encryption{Current: "a"}},
	})
	for _, field := range []string{"Scope", "Keys.Header", "Failures.Lease", "Requests.MaxBody", "Answers.StatusPath", "Keys.Methods", "Responses.Encryption.Current", "Answers.ReusedStatus"} {
		if err == nil || !strings.Contains(err.Error(), "idempotency.Config."+field+" ") {
			t.Errorf("%s is missing in %v", field, err)
		}
	}
	var bad *oncemill.ConfigError
	if !errors.As(err, &bad) {
		t.Errorf("got %T", err)
	}
	if _, err := idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{Scope: idempotency.SingleTenant()}); err != nil {
		t.Errorf("only with a scope: %v", err)
	}
	if _, err := idempotency.New(nil, idempotency.Config{}); !errors.As(err, &bad) {
		t.Errorf("no store: %v", err)
	}
}

func TestTxMiddleware_PanicsWithoutTransactions(t *testing.T) {
	t.Parallel()
	defer func() {
		if v, _ := recover().(error); !errors.Is(v, idempotency.ErrNotTransactional) {
			t.Errorf("got %v", v)
		}
	}()
	newEngine(t, &idempotency.MemoryStore{}, nil).TxMiddleware(ok(""))
}

func TestMiddleware_InProgressPolicies(t *testing.T) {
	t.Parallel()
	for policy, status := range map[idempotency.InProgressPolicy]int{
		idempotency.InProgressConflict: 409, idempotency.InProgressTooEarly: 425, idempotency.InProgressTooManyRequests: 429, idempotency.InProgressAccepted: 202, idempotency.InProgressWait: 200,
	} {
		engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Answers.InProgress, c.Answers.StatusPath = policy, "/status/"
		})
		running, goOn := make(chan struct{}), make(chan struct{})
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(running)
			<-goOn
			_, _ = io.WriteString(w, "done")
		}))
		var sending sync.WaitGroup
		sending.Go(func() { do(t, handler, post("/", "x")) })
		<-running
		if policy == idempotency.InProgressWait {
			sending.Go(func() {
				testserver.Pause(t.Context(), 20*time.Millisecond)
				close(goOn)
			})
		}
		w := do(t, handler, post("/", "x"))
		if w.Code != status {
			t.Errorf("%v: status %d: %s", policy, w.Code, w.Body)
		}
		switch policy {
		case idempotency.InProgressWait:
			if w.Body.String() != "done" || w.Header().Get("Idempotency-Replayed") != "true" {
				t.Errorf("got %s", w.Body)
			}
		case idempotency.InProgressAccepted:
			state := do(t, engine.StatusHandler(), httptest.NewRequest(http.MethodGet, w.Header().Get("Location"), nil))
			if !strings.Contains(state.Body.String(), `"state":"started"`) {
				t.Errorf("status is %d %s", state.Code, state.Body)
			}
			stranger := httptest.NewRequest(http.MethodGet, w.Header().Get("Location"), nil)
			stranger.Header.Set("X-User", "somebody else")
			if w := do(t, engine.StatusHandler(), stranger); w.Code != http.StatusNotFound {
				t.Errorf("a stranger sees %s", w.Body)
			}
			fallthrough
		default:
			if w.Header().Get("Retry-After") != "1" {
				t.Errorf("%v: Retry-After %q", policy, w.Header().Get("Retry-After"))
			}
			close(goOn)
		}
		sending.Wait()
	}
}

// counted counts the runs of a handler.
func counted(runs *int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		*runs++
		_, _ = io.WriteString(w, "ran")
	})
}

func TestMiddleware_ExpiryAndRefusal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for refuse, want := range map[time.Duration]int{0: 200, time.Hour: 410} {
			engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
				c.Expiry.RefuseFor = refuse
				c.Expiry.RetentionFor = func(*http.Request, int) time.Duration { return time.Minute }
			})
			handler := engine.Middleware(ok("x"))
			do(t, handler, post("/", "x"))
			time.Sleep(59 * time.Second)
			if w := do(t, handler, post("/", "x")); w.Header().Get("Idempotency-Replayed") == "" {
				t.Error("expired too early")
			}
			time.Sleep(2 * time.Second)
			if w := do(t, handler, post("/", "x")); w.Code != want || w.Header().Get("Idempotency-Replayed") != "" {
				t.Errorf("refuse %v: %d", refuse, w.Code)
			}
			time.Sleep(2 * time.Hour)
			if w := do(t, handler, post("/", "x")); w.Code != 200 || w.Header().Get("Idempotency-Replayed") != "" {
				t.Errorf("forgotten, refuse %v: %d", refuse, w.Code)
			}
		}
	})
}

func TestMiddleware_Options(t *testing.T) {
	t.Parallel()
	handler := func(change func(*idempotency.Config), next http.Handler) http.Handler {
		return newEngine(t, &idempotency.MemoryStore{}, change).Middleware(next)
	}
	h := handler(func(c *idempotency.Config) { c.Keys.Header = "x-request-key" }, ok("x"))
	expectReason(t, do(t, h, post("/", "x")), "key-missing", "The header X-Request-Key is missing.")
	if w := do(t, h, post("/", "x", func(r *http.Request) { r.Header.Set("X-Request-Key", "a") })); w.Code != 200 {
		t.Errorf("another header: %d", w.Code)
	}
	h = handler(func(c *idempotency.Config) { c.Keys.StrictUUID = true }, ok("x"))
	expectReason(t, do(t, h, post("/", "x")), "key-invalid", "The key is not a UUID.")
	do(t, h, post("/", "x", withKey("8E03978E-40D5-43E8-BC93-6E9BDB8C4C54")))
	if w := do(t, h, post("/", "x", withKey(`"8e03978e-40d5-43e8-bc93-6e9bdb8c4c54"`))); w.Header().Get("Idempotency-Replayed") != "true" {
		t.Errorf("UUID in another case: %d %s", w.Code, w.Body)
	}
	h = handler(func(c *idempotency.Config) { c.Keys.TrimSpace = true }, ok("x"))
	expectReason(t, do(t, h, post("/", "x", withKey("a b"))), "key-invalid", "not visible ASCII outside of quotes")
	do(t, h, post("/", "x", withKey(`"  a "`)))
	if w := do(t, h, post("/", "x", withKey("a"))); w.Header().Get("Idempotency-Replayed") != "true" {
		t.Errorf("trimmed: %d", w.Code)
	}
	h = handler(func(c *idempotency.Config) { c.Keys.Optional = true }, ok("x"))
	if w := do(t, h, post("/", "x", withoutKey)); w.Code != 200 {
		t.Errorf("optional: %d", w.Code)
	}
	h = handler(func(c *idempotency.Config) { c.Requests.Headers = []string{"x-version"} }, ok("x"))
	do(t, h, post("/", "x", func(r *http.Request) { r.Header.Set("X-Version", "1") }))
	expectProblem(t, do(t, h, post("/", "x", func(r *http.Request) { r.Header.Set("X-Version", "2") })), 422, "key-reused")
	h = handler(func(c *idempotency.Config) { c.Answers.ReusedStatus = 409 }, ok("x"))
	do(t, h, post("/", "x"))
	expectProblem(t, do(t, h, post("/", "y")), 409, "key-reused")
	h = handler(func(c *idempotency.Config) { c.Responses.Storable = idempotency.StorableSuccesses }, http.NotFoundHandler())
	for range 2 {
		if w := do(t, h, post("/", "x")); w.Code != 404 || w.Header().Get("Idempotency-Replayed") != "" {
			t.Errorf("successes only: %d", w.Code)
		}
	}
	h = handler(func(c *idempotency.Config) { c.Responses.Storable = idempotency.StorableAll }, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }))
	do(t, h, post("/", "x"))
	if w := do(t, h, post("/", "x")); w.Code != 500 || w.Header().Get("Idempotency-Replayed") != "true" {
		t.Errorf("as Stripe: %d", w.Code)
	}
	h = handler(func(c *idempotency.Config) { c.Requests.Body = idempotency.BodyJSON }, ok("x"))
	asJSON := func(r *http.Request) { r.Header.Set("Content-Type", "application/json") }
	do(t, h, post("/", `{"a":1, "b":[true]}`, asJSON))
	if w := do(t, h, post("/", `{ "b" : [true],"a":1}`, asJSON)); w.Header().Get("Idempotency-Replayed") != "true" {
		t.Errorf("canonical JSON: %d", w.Code)
	}
	expectProblem(t, do(t, h, post("/", `{"a":1.0, "b":[true]}`, asJSON)), 422, "key-reused")
	h = handler(func(c *idempotency.Config) {
		c.Scope = func(*http.Request) (idempotency.Scope, error) { return idempotency.Scope{}, errors.New("who is this?") }
	}, ok("x"))
	expectProblem(t, do(t, h, post("/", "x")), 500, "internal")
	for _, c := range []struct {
		scope  idempotency.Scope
		err    error
		status int
		detail string
	}{
		{idempotency.Scope{}, nil, 400, "Keys belong to a caller"},
		{idempotency.Scope{Route: "/orders"}, nil, 400, "Keys belong to a caller"},
		{idempotency.Scope{}, fmt.Errorf("no token: %w", &idempotency.ScopeError{Status: 401, Detail: "Sign in."}), 401, "Sign in."},
	} {
		h = handler(func(cfg *idempotency.Config) {
			cfg.Scope = func(*http.Request) (idempotency.Scope, error) { return c.scope, c.err }
		}, ok("x"))
		w := do(t, h, post("/", "x"))
		expectProblem(t, w, c.status, "scope-missing")
		if !strings.Contains(w.Body.String(), c.detail) {
			t.Errorf("scope %+v: %s", c.scope, w.Body)
		}
	}
	if tx, ok := idempotency.TxFromContext(t.Context()); tx != nil || ok {
		t.Errorf("without a transaction: %v, %v", tx, ok)
	}
	h = handler(func(c *idempotency.Config) {
		c.Answers.Write = func(w http.ResponseWriter, _ *http.Request, p idempotency.Problem) {
			http.Error(w, p.Kind, http.StatusTeapot)
		}
	}, ok("x"))
	if w := do(t, h, post("/", "x", withoutKey)); w.Code != http.StatusTeapot || !strings.Contains(w.Body.String(), "key-missing") {
		t.Errorf("own answers: %d", w.Code)
	}
}

func TestMiddleware_PointerInsteadOfSnapshot(t *testing.T) {
	t.Parallel()
	made := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		idempotency.SetResourceID(r.Context(), "7")
		w.Header().Set("Location", "/orders/7")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "a long story")
	})
	plain := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Responses.Pointer = true }).Middleware(made)
	resolving := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Responses.Pointer = true
		c.Responses.Resolve = func(_ context.Context, r idempotency.Record) ([]byte, error) {
			return []byte("order " + r.ResourceID), nil
		}
	}).Middleware(made)
	for body, h := range map[string]http.Handler{"": plain, "order 7": resolving} {
		do(t, h, post("/", "x"))
		w := do(t, h, post("/", "x"))
		if w.Code != 201 || w.Header().Get("Location") != "/orders/7" || w.Body.String() != body {
			t.Errorf("got %d %q %q", w.Code, w.Header(), w.Body)
		}
	}
}

func TestMiddleware_StoresCompressedEncryptedAndLargeResponses(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		body := strings.Repeat("very secret ", 10_000)
		old := idempotency.Encryption{Current: "1", Keys: map[string]oncemill.Secret{"1": oncemill.NewSecret(bytes.Repeat([]byte("k"), 32))}}
		engine := p.engine(t, func(c *idempotency.Config) { c.Responses.Encryption, c.Responses.LargeAbove = &old, 1000 })
		h := engine.TxMiddleware(ok(body))
		do(t, h, post("/", "x"))
		if n := p.count(t, `select count(*) from {{idempotency_body}}`); n != 1 {
			t.Errorf("%d large responses", n)
		}
		if n := p.count(t, `select count(*) from {{idempotency}} where response is not null`); n != 0 {
			t.Errorf("%d in the table of the keys", n)
		}
		// A new key, and compression: the old response is read with the old one.
		renewed := idempotency.Encryption{Current: "2", Keys: map[string]oncemill.Secret{"1": old.Keys["1"], "2": oncemill.NewSecret(bytes.Repeat([]byte("n"), 16))}}
		engine = p.engine(t, func(c *idempotency.Config) { c.Responses.Encryption, c.Responses.CompressAbove = &renewed, 100 })
		h = engine.TxMiddleware(ok(body))
		for _, key := range []string{"key", "new", "new"} {
			if w := do(t, h, post("/", "x", withKey(key))); w.Body.String() != body {
				t.Errorf("%s: %d, %d bytes", key, w.Code, w.Body.Len())
			}
		}
		var stored []byte
		if err := p.db.QueryRowContext(t.Context(), p.expand(t, `select response from {{idempotency}} where response is not null`)).Scan(&stored); err != nil {
			t.Fatal(err)
		}
		if len(stored) > 2000 || bytes.Contains(stored, []byte("secret")) {
			t.Errorf("%d bytes are stored", len(stored))
		}
		// Without the key nothing is run again.
		h = p.engine(t, nil).TxMiddleware(ok("never"))
		expectProblem(t, do(t, h, post("/", "x")), 503, "store-unavailable")
	})
}

func TestMiddleware_LimitsWhatACallerHasOutstanding(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) { c.Keys.MaxOutstanding = 3 })
		goOn := make(chan struct{})
		started := make(chan struct{}, 3)
		handler := engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			started <- struct{}{}
			<-goOn
		}))
		var sending sync.WaitGroup
		for _, key := range []string{"a", "b", "c"} {
			sending.Go(func() { do(t, handler, post("/", "x", withKey(key))) })
			<-started
		}
		w := do(t, handler, post("/", "x", withKey("d")))
		expectProblem(t, w, 429, "too-many-outstanding")
		if w.Header().Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		close(goOn)
		sending.Wait()
		if w := do(t, handler, post("/", "x", withKey("d"))); w.Code != 200 {
			t.Errorf("then %d", w.Code)
		}
	})
}

func TestMiddleware_NeverShowsKeyOrScope(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		const key, tenant, user = "canary-key-0815", "canary-tenant", "canary-user"
		var log bytes.Buffer
		reader := metric.NewManualReader()
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Logger = slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			c.Telemetry.MeterProvider = metric.NewMeterProvider(metric.WithReader(reader))
		})
		handler := engine.TxMiddleware(ok("x"))
		as := func(r *http.Request) {
			r.Header.Set("X-Tenant", tenant)
			r.Header.Set("X-User", user)
			r.Header.Set("Idempotency-Key", key)
		}
		do(t, handler, post("/", "x", as))
		do(t, handler, post("/", "x", as))
		do(t, handler, post("/", "y", as))
		var metrics metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &metrics); err != nil {
			t.Fatal(err)
		}
		encoded, err := json.Marshal(metrics)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"idempotency.started_total", "idempotency.replayed_total", "idempotency.mismatched_hash_conflicts_total", "idempotency.store_latency"} {
			if !bytes.Contains(encoded, []byte(`"`+name+`"`)) {
				t.Errorf("no metric %s in %s", name, encoded)
			}
		}
		for _, event := range []string{"idempotency key received", "new request processing", "request completed", "cached response returned"} {
			if !strings.Contains(log.String(), event) {
				t.Errorf("no event %q", event)
			}
		}
		rows := testserver.Texts(t, p.db, p.expand(t, `select endpoint || coalesce(location, '') || coalesce(correlation_id, '') from {{idempotency}}`))
		for _, place := range []string{log.String(), string(encoded), strings.Join(rows, "")} {
			if strings.Contains(place, "canary") {
				t.Errorf("it is in %s", place)
			}
		}
	})
}

func TestTxMiddleware_OptionalKeyStillHasATransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) { c.Keys.Optional = true })
		status := http.StatusOK
		handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			if _, err := tx.ExecContext(r.Context(), `insert into effects (name) values ('a')`); err != nil {
				t.Error(err)
			}
			w.WriteHeader(status)
		}))
		do(t, handler, post("/", "x", withoutKey))
		status = http.StatusInternalServerError
		do(t, handler, post("/", "x", withoutKey))
		if n := p.count(t, `select count(*) from effects`); n != 1 {
			t.Errorf("%d effects", n)
		}
	})
}

func TestEngine_PurgesWhatIsToBeForgotten(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Retention, c.Expiry.PurgeBatch, c.Responses.LargeAbove = time.Second, 3, 10
		})
		handler := engine.TxMiddleware(ok("longer than ten bytes"))
		for i := range 10 {
			do(t, handler, post("/", "x", withKey(string(rune('a'+i)))))
		}
		kept := p.engine(t, nil).TxMiddleware(ok("kept"))
		do(t, kept, post("/", "x", withKey("kept")))
		total := 0
		eventually(t, "ten keys are purged", func() bool {
			n, err := engine.Purge(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			total += n
			return p.count(t, `select count(*) from {{idempotency}}`) == 1
		})
		if n := p.count(t, `select count(*) from {{idempotency_body}}`); n != 0 {
			t.Errorf("%d bodies are left", n)
		}
		if total < 10 {
			t.Errorf("%d purged", total)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := engine.Run(ctx); err != nil {
			t.Error(err)
		}
	})
}

// A client that breaks off must not leave a claim that is not run.
func TestMiddleware_RunsForAClientThatHasGone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		handler := p.engine(t, nil).Middleware(ok("ran"))
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		do(t, handler, post("/", "x").WithContext(gone))
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK || w.Header().Get("Idempotency-Replayed") != "true" {
			t.Errorf("got %d %s", w.Code, w.Body)
		}
	})
}

// Missing migrations are reported at once.
func TestEngine_RunNeedsTheTables(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		tables := p.cfg
		tables.Prefix = "none_"
		store, err := idempotency.NewSQLStore(p.db, idempotency.StoreConfig{Database: tables})
		if err != nil {
			t.Fatal(err)
		}
		var schema *oncemill.SchemaError
		if err := newEngine(t, store, nil).Run(t.Context()); !errors.As(err, &schema) || schema.Set != "idempotency" {
			t.Errorf("got %v", err)
		}
	})
}
