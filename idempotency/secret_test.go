package idempotency_test

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
)

const canary = "canary-0815-secret-of-32-bytes.."

func encrypted(c *idempotency.Config) {
	c.Responses.Encryption = &idempotency.Encryption{Current: "1", Keys: map[string]oncemill.Secret{"1": oncemill.NewSecret([]byte(canary))}}
}

// No verb of fmt shows a key, whichever way it is reached.
func TestConfig_PrintsNoSecret(t *testing.T) {
	t.Parallel()
	cfg := idempotency.Config{Keys: idempotency.KeyConfig{Secret: oncemill.NewSecret([]byte(canary))}}
	encrypted(&cfg)
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Keys.Secret, c.Responses.Encryption = cfg.Keys.Secret, cfg.Responses.Encryption
	})
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "secret", cfg.Keys.Secret, "encryption", cfg.Responses.Encryption)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "secret", cfg.Keys.Secret, "encryption", *cfg.Responses.Encryption)
	encoded, err := json.Marshal(cfg.Responses.Encryption)
	if err != nil {
		t.Fatal(err)
	}
	printed := log.String() + string(encoded)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%X", "%q", "%d"} {
		for _, what := range []any{cfg, &cfg, cfg.Keys.Secret, cfg.Responses.Encryption, *cfg.Responses.Encryption, engine} {
			printed += fmt.Sprintf(verb, what)
		}
	}
	decimals := fmt.Sprintf("%d", []byte(canary[:8]))
	for _, form := range []string{canary[:8], fmt.Sprintf("%x", canary[:8]), fmt.Sprintf("%X", canary[:8]), decimals[1 : len(decimals)-1], "0x63, 0x61, 0x6e", "1634623843" /* of the key schedule */} {
		if strings.Contains(printed, form) {
			t.Errorf("%s is printed in %s", form, printed)
		}
	}
}

// plainResponse is what an engine without encryption stores.
func plainResponse(body string) []byte {
	head := []byte(`{"s":200}`)
	plain := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(head)))
	return append(append(plain, head...), body...)
}

// Write access to the table or the cache does not suffice to forge a response.
func TestEncryption_RefusesPlainResponses(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		cache := &cacheOf{}
		reader := metric.NewManualReader()
		provider := metric.NewMeterProvider(metric.WithReader(reader))
		with := func(accept bool) http.Handler {
			return p.engine(t, func(c *idempotency.Config) {
				encrypted(c)
				c.Responses.Encryption.AcceptPlain = accept
				c.Responses.Cache, c.Telemetry.MeterProvider = cache, provider
			}).Middleware(ok("genuine"))
		}
		do(t, with(false), post("/", "x"))
		forged := *cache.record.Load()
		forged.Response = plainResponse("FORGED")
		cache.record.Store(&forged)
		if w := do(t, with(false), post("/", "x")); w.Body.String() != "genuine" {
			t.Errorf("from the cache: %d %s", w.Code, w.Body)
		}
		p.exec(t, `update {{idempotency}} set response = $1`, forged.Response)
		expectProblem(t, do(t, with(false), post("/", "x")), http.StatusServiceUnavailable, "store-unavailable")
		if w := do(t, with(true), post("/", "x")); w.Body.String() != "FORGED" {
			t.Errorf("while encryption is introduced: %d %s", w.Code, w.Body)
		}
		var metrics metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &metrics); err != nil {
			t.Fatal(err)
		}
		if text, _ := json.Marshal(metrics); !bytes.Contains(text, []byte("plain_refused_total")) {
			t.Error("nothing is counted")
		}
	})
}

// A response belongs to a key, its caller and a request. Moved to another record, in the
// table or the cache, it is refused.
func TestEncryption_BindsAResponseToItsRequest(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		cache := &cacheOf{}
		handler := p.engine(t, func(c *idempotency.Config) {
			encrypted(c)
			c.Responses.Cache = cache
		}).Middleware(ok("for one euro"))
		do(t, handler, post("/", "amount=1"))
		genuine := *cache.record.Load()
		other := &cacheOf{}
		do(t, newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Responses.Cache = other }).Middleware(ok("x")), post("/", "amount=1000"))
		forged := genuine
		forged.Fingerprint = other.record.Load().Fingerprint
		if forged.ID != other.record.Load().ID || forged.Fingerprint == genuine.Fingerprint {
			t.Fatal("the key is another, or the request is not")
		}
		cache.record.Store(&forged)
		expectProblem(t, do(t, handler, post("/", "amount=1000")), http.StatusUnprocessableEntity, "key-reused")
		forged = genuine
		forged.Caller[0]++
		cache.record.Store(&forged)
		p.exec(t, `update {{idempotency}} set caller = $1`, forged.Caller[:])
		expectProblem(t, do(t, handler, post("/", "amount=1")), http.StatusServiceUnavailable, "store-unavailable")
	})
}

// A claim that was taken over or settled keeps its fingerprint, so that the stored response
// can be decrypted.
func TestEncryption_ReadsWhatATakeOverHasStored(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := &spy{Store: p.store}
		engine := newEngine(t, store, encrypted)
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
		do(t, handler, post("/", "x", withKey("settled")))
		found := idempotency.Recovery{Status: 201, Body: []byte("found")}
		if err := engine.Settle(t.Context(), store.last.Load().ID.Token(), found); err != nil {
			t.Error(err)
		}
		if w := do(t, handler, post("/", "x", withKey("settled"))); w.Body.String() != "found" {
			t.Errorf("settled: %d %s", w.Code, w.Body)
		}
		again := newEngine(t, store, func(c *idempotency.Config) {
			encrypted(c)
			c.Failures.Crashed = idempotency.CrashedTakeOver
		}).Middleware(ok("again"))
		do(t, handler, post("/", "x", withKey("older")))
		older := store.last.Load().Fingerprint
		older[0] = 1 // of an older version
		p.exec(t, `update {{idempotency}} set fingerprint = $1 where state = 1`, older[:])
		for range 2 {
			if w := do(t, again, post("/", "x", withKey("older"))); w.Body.String() != "again" {
				t.Errorf("taken over: %d %s", w.Code, w.Body)
			}
		}
	})
}

// With encryption, the table contains nothing from a handler in clear text.
func TestEncryption_LeavesNothingInClear(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		cache := &cacheOf{}
		engine := p.engine(t, func(c *idempotency.Config) {
			encrypted(c)
			c.Answers.StatusPath, c.Responses.MaxSize, c.Responses.Cache = "/status/", 100, cache
		})
		for _, size := range []int{10, 200} {
			handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				idempotency.SetResourceID(r.Context(), "canary-resource")
				w.Header().Set("Location", "/canary/7")
				_, _ = w.Write(make([]byte, size))
			}))
			key := fmt.Sprint("key", size)
			correlated := func(r *http.Request) { r.Header.Set("X-Correlation-Id", "canary-correlation") }
			for i := range 2 {
				if w := do(t, handler, post("/", "x", withKey(key), correlated)); w.Header().Get("Location") != "/canary/7" {
					t.Errorf("%d bytes, time %d: %d %v", size, i, w.Code, w.Header())
				}
			}
		}
		var rows string
		if err := p.db.QueryRowContext(t.Context(), p.expand(t, `select coalesce(max(location), '') || coalesce(min(location), '') || coalesce(max(resource_id), '')
			|| coalesce(min(resource_id), '') || coalesce(max(correlation_id), '') from {{idempotency}}`)).Scan(&rows); err != nil {
			t.Fatal(err)
		}
		if cached := cache.record.Load(); rows == "" || strings.Contains(rows, "canary") || strings.Contains(cached.Location+cached.ResourceID, "canary") {
			t.Errorf("stored: %q, cached: %+v", rows, cached)
		}
		// Its owner sees it, by way of the status.
		record, found, err := p.store.Find(t.Context(), cache.record.Load().ID)
		if err != nil || !found {
			t.Fatal(found, err)
		}
		status := do(t, engine.StatusHandler(), httptest.NewRequest(http.MethodGet, "/status/"+record.ID.Token(), nil))
		if !strings.Contains(status.Body.String(), `"location":"/canary/7"`) || !strings.Contains(status.Body.String(), "canary-resource") {
			t.Errorf("status: %s", status.Body)
		}
	})
}

// A small row cannot decompress to any number of bytes.
func TestMiddleware_DecompressesWithinBounds(t *testing.T) {
	var b bytes.Buffer
	w, _ := flate.NewWriter(&b, flate.BestCompression)
	block := make([]byte, 1<<20)
	for range 300 {
		_, _ = w.Write(block)
	}
	_ = w.Close()
	store := &idempotency.MemoryStore{}
	cache := &cacheOf{}
	handler := newEngine(t, store, func(c *idempotency.Config) { c.Responses.Cache = cache }).Middleware(ok("genuine"))
	do(t, handler, post("/", "x"))
	bomb := *cache.record.Load()
	bomb.Response = append([]byte{1}, b.Bytes()...)
	cache.record.Store(&bomb)
	n := allocated(func() {
		if w := do(t, handler, post("/", "x")); w.Body.String() != "genuine" {
			t.Errorf("got %d, %d bytes", w.Code, w.Body.Len())
		}
	})
	if n > 700<<20 {
		t.Errorf("%d MiB were allocated", n>>20)
	}
}

// Without a pattern, an endpoint is not a path: there are too many, and some contain secrets.
func TestMiddleware_PathsAreNoAttributes(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var log bytes.Buffer
		reader := metric.NewManualReader()
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Scope = idempotency.SingleTenant()
			c.Logger = slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			c.Telemetry.MeterProvider = metric.NewMeterProvider(metric.WithReader(reader))
			c.Keys.Optional = true
		})
		handler := engine.TxMiddleware(ok("x"))
		for i := range 20 {
			do(t, handler, post(fmt.Sprintf("/reset/canary-%d", i), "x"))
			do(t, handler, post(fmt.Sprintf("/reset/canary-%d", i), "x", withoutKey))
		}
		mux := http.NewServeMux()
		mux.Handle("POST /reset/{token}", handler)
		do(t, mux, post("/reset/canary", "x", withKey("other")))
		var metrics metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &metrics); err != nil {
			t.Fatal(err)
		}
		text, _ := json.Marshal(metrics)
		if strings.Contains(string(text)+log.String(), "canary") {
			t.Error("a path is in metrics or log")
		}
		if n := p.count(t, `select count(*) from {{idempotency}} where endpoint = 'POST unmatched'`); n != 20 {
			t.Errorf("%d keys of paths", n)
		}
		if n := p.count(t, `select count(*) from {{idempotency}} where endpoint = 'POST /reset/{token}'`); n != 1 {
			t.Errorf("%d keys of patterns", n)
		}
	})
}

// With a secret, equal bodies of two services have different fingerprints. A fingerprint of
// another version matches.
func TestFingerprint_IsKeyedAndVersioned(t *testing.T) {
	t.Parallel()
	fingerprint := func(secret string) idempotency.Fingerprint {
		cache := &cacheOf{}
		do(t, newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Responses.Cache = cache
			if secret != "" {
				c.Keys.Secret = oncemill.NewSecret([]byte(secret))
			}
		}).Middleware(ok("x")), post("/", "x"))
		return cache.record.Load().Fingerprint
	}
	if a, b, c := fingerprint(""), fingerprint("a"), fingerprint("b"); a == b || b == c || a != fingerprint("") || b != fingerprint("a") {
		t.Error("the secret is no part of it")
	}
	p := onPostgres(t)
	handler := p.engine(t, nil).TxMiddleware(ok("x"))
	do(t, handler, post("/", "x"))
	p.exec(t, `update {{idempotency}} set fingerprint = set_byte(fingerprint, 0, 1)`)
	for range 2 {
		if w := do(t, handler, post("/", "x")); w.Header().Get("Idempotency-Replayed") == "" {
			t.Errorf("after an upgrade: %d %s", w.Code, w.Body)
		}
	}
}
