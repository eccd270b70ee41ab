package redis_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/redis"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) {
	// go-redis looks once a second for a server that has gone, and learns only then
	// that its client is closed.
	os.Exit(testserver.Main(m, goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")))
}

// counted counts what reaches the store.
type counted struct {
	*idempotency.SQLStore
	claims atomic.Int64
}

func (c *counted) Claim(ctx context.Context, claim idempotency.Claim) (idempotency.Record, bool, error) {
	c.claims.Add(1)
	return c.SQLStore.Claim(ctx, claim)
}

type service struct {
	t       *testing.T
	redis   *testserver.RedisServer
	client  *goredis.Client
	store   *counted
	handler http.Handler
	runs    atomic.Int64
}

func newService(t *testing.T) *service {
	t.Helper()
	db := testserver.SQLite(t)
	// Opening a connection for each look at a record would be most of the work.
	db.SetMaxOpenConns(8)
	db.SetMaxIdleConns(8)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, idempotency.Migrations); err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{})
	if err != nil {
		t.Fatal(err)
	}
	s := &service{t: t, redis: testserver.PrivateRedis(t), store: &counted{SQLStore: store}}
	s.client = goredis.NewClient(&goredis.Options{Addr: s.redis.Address(), MaxRetries: -1})
	t.Cleanup(func() { _ = s.client.Close() })
	cache, err := redis.New(s.client, redis.Config{Rest: time.Millisecond, Timeout: 2 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(s.store, idempotency.Config{
		Scope:     idempotency.SingleTenant(),
		Retention: time.Hour,
		Logger:    slog.New(slog.DiscardHandler),
		Timeout:   time.Minute, // a slow disk is no failure
		Responses: idempotency.ResponseConfig{Cache: cache},
		Answers:   idempotency.AnswerConfig{InProgress: idempotency.InProgressWait, WaitTimeout: time.Minute},
	})
	if err != nil {
		t.Fatal(err)
	}
	s.handler = engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s.runs.Add(1)
		w.Header().Set("Location", "/orders/7")
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write([]byte("made"))
	}))
	return s
}

func (s *service) post(key, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(body))
	r.Header.Set("Idempotency-Key", key)
	w := httptest.NewRecorder()
	s.handler.ServeHTTP(w, r)
	return w
}

// expect sends a copy and checks the answer and how many requests have reached the
// store, and the handler, so far.
func (s *service) expect(key string, claims, runs int64) {
	s.t.Helper()
	if w := s.post(key, "x"); w.Code != http.StatusCreated || w.Body.String() != "made" || w.Header().Get("Location") != "/orders/7" {
		s.t.Errorf("got %d %s", w.Code, w.Body)
	}
	if s.store.claims.Load() != claims || s.runs.Load() != runs {
		s.t.Errorf("%d claims and %d runs, want %d and %d", s.store.claims.Load(), s.runs.Load(), claims, runs)
	}
}

func TestCache_AnswersReplaysAndNothingElse(t *testing.T) {
	t.Parallel()
	s := newService(t)
	s.expect("a", 1, 1)
	s.expect("a", 1, 1)
	s.expect("a", 1, 1)
	if w := s.post("a", "another"); w.Code != http.StatusUnprocessableEntity {
		t.Errorf("another body: %d", w.Code)
	}
	keys, err := s.client.Keys(t.Context(), "oncemill:idempotency:*").Result()
	if err != nil || len(keys) != 1 {
		t.Fatalf("%q %v", keys, err)
	}
	if ttl := s.client.TTL(t.Context(), keys[0]).Val(); ttl <= 50*time.Minute || ttl > time.Hour {
		t.Errorf("it expires in %v", ttl)
	}
	// The store, which was asked about that, fills the cache again.
	s.client.FlushAll(t.Context())
	s.expect("a", 3, 1)
	s.expect("a", 3, 1)
	good := s.client.Get(t.Context(), keys[0]).Val()
	// What is not ours is not believed, nor what is damaged, nor what is of another request.
	s.client.Set(t.Context(), keys[0], "garbage", 0)
	s.expect("a", 4, 1)
	s.expect("b", 5, 2)
	both, _ := s.client.Keys(t.Context(), "oncemill:idempotency:*").Result()
	for _, key := range both {
		if key != keys[0] {
			s.client.Set(t.Context(), keys[0], s.client.Get(t.Context(), key).Val(), 0)
		}
	}
	s.expect("a", 6, 2)
	for i, field := range []string{"response", "fingerprint"} {
		var e map[string]any
		if err := json.Unmarshal([]byte(good), &e); err != nil {
			t.Fatal(err)
		}
		value, _ := base64.StdEncoding.DecodeString(e[field].(string))
		value[len(value)/3] ^= 0xff
		e[field] = value
		damaged, _ := json.Marshal(e)
		s.client.Set(t.Context(), keys[0], damaged, 0)
		s.expect("a", 7+int64(i), 2)
	}
}

// Redis is flushed, killed and started again while copies of many requests come.
func TestCache_LosingRedisInTheMiddleChangesNothing(t *testing.T) {
	t.Parallel()
	s := newService(t)
	const requests, copies = 20, 5
	var sending sync.WaitGroup
	var answered atomic.Int64
	for i := range requests {
		for range copies {
			sending.Go(func() {
				if w := s.post(strconv.Itoa(i), "x"); w.Code != http.StatusCreated || w.Body.String() != "made" {
					t.Errorf("got %d %s", w.Code, w.Body)
				}
				answered.Add(1)
			})
		}
		switch i {
		case 5:
			s.client.FlushAll(t.Context())
		case 10:
			s.redis.Kill()
		case 15:
			s.redis.Start()
			s.client.FlushAll(t.Context())
		}
	}
	sending.Wait()
	if s.runs.Load() != requests || answered.Load() != requests*copies {
		t.Errorf("%d runs, %d answers", s.runs.Load(), answered.Load())
	}
	s.redis.Kill()
	for i := range requests {
		if w := s.post(strconv.Itoa(i), "x"); w.Code != http.StatusCreated || w.Header().Get("Idempotency-Replayed") != "true" {
			t.Errorf("without Redis: %d", w.Code)
		}
	}
	if s.runs.Load() != requests {
		t.Errorf("%d runs", s.runs.Load())
	}
}

func TestNew_ReportsAllBadValuesAtOnce(t *testing.T) {
	t.Parallel()
	_, err := redis.New(nil, redis.Config{Timeout: -1, Rest: -1, MaxResponse: -1})
	if err == nil || strings.Count(err.Error(), "redis.") != 4 {
		t.Errorf("got %v", err)
	}
}

// What is removed is not replayed, and a Redis that cannot be reached is reported.
func TestCache_RemovesRecords(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for i := range 3 {
		s.post(strconv.Itoa(i), "x")
	}
	cache, err := redis.New(s.client, redis.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	keys := s.client.Keys(t.Context(), "oncemill:idempotency:*").Val()
	if len(keys) != 3 {
		t.Fatalf("%d keys in Redis", len(keys))
	}
	ids := make([]idempotency.ID, 2, 1500)
	for i := range ids {
		copy(ids[i][:], strings.TrimPrefix(keys[i], "oncemill:idempotency:"))
	}
	for len(ids) < cap(ids) {
		ids = append(ids, idempotency.ID{byte(len(ids)), byte(len(ids) >> 8)})
	}
	if err := cache.Remove(t.Context(), ids); err != nil {
		t.Error(err)
	}
	if left := s.client.Keys(t.Context(), "*").Val(); len(left) != 1 || left[0] != keys[2] {
		t.Errorf("%d keys are left", len(left))
	}
	s.redis.Kill()
	if err := cache.Remove(t.Context(), ids[:1]); err == nil {
		t.Error("no error without Redis")
	}
	if err := cache.Remove(t.Context(), nil); err != nil {
		t.Errorf("nothing to remove: %v", err)
	}
}
