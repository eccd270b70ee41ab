package idempotency_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// BenchmarkTxMiddleware measures what the limits and the archive cost a first run.
func BenchmarkTxMiddleware(b *testing.B) {
	pg := testserver.Postgres(b)
	db := pg.DB
	db.SetMaxOpenConns(16)
	db.SetMaxIdleConns(16)
	if err := oncemill.Migrate(b.Context(), db, pg.Config, idempotency.Migrations, idempotency.QuotaMigrations); err != nil {
		b.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: pg.Config, Prepare: true})
	if err != nil {
		b.Fatal(err)
	}
	var n atomic.Int64
	for _, c := range []struct {
		name   string
		change func(*idempotency.Config)
	}{
		{"plain", func(*idempotency.Config) {}},
		{"quota", func(c *idempotency.Config) { c.Keys.Quota = idempotency.Quota{Keys: 1_000_000_000, Bytes: 1 << 50} }},
		{"archive", func(c *idempotency.Config) {
			c.Expiry.Archive = func(context.Context, []idempotency.ArchivedKey) error { return nil }
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			cfg := idempotency.Config{Scope: idempotency.SingleTenant(), Timeout: 25 * time.Second}
			c.change(&cfg)
			engine, err := idempotency.New(store, cfg)
			if err != nil {
				b.Fatal(err)
			}
			handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("made")) }))
			b.SetParallelism(8)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					w := httptest.NewRecorder()
					handler.ServeHTTP(w, post("/", "x", withKey(strconv.FormatInt(n.Add(1), 10))))
					if w.Code != http.StatusOK {
						b.Errorf("%d %s", w.Code, w.Body)
					}
				}
			})
		})
	}
}
