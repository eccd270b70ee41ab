package storetest_test

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/storetest"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

func TestStore_InMemory(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(*testing.T) idempotency.Store { return &idempotency.MemoryStore{} })
}

func TestStore_OnPostgreSQL(t *testing.T) {
	t.Parallel()
	params := map[string][]string{
		"binary parameters": {"binary_parameters=yes"},
		"text parameters":   {"binary_parameters=no"},
		"repeatable read":   {"binary_parameters=yes", "default_transaction_isolation=repeatable read"},
		"serializable":      {"binary_parameters=yes", "default_transaction_isolation=serializable"},
	}
	for _, name := range testserver.OneOf(t, slices.Sorted(maps.Keys(params))...) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onPostgreSQL(t, false, params[name]...)
		})
	}
}

func TestStore_OnPostgreSQLPrepared(t *testing.T) {
	t.Parallel()
	onPostgreSQL(t, true, "default_transaction_isolation=repeatable read")
}

func onPostgreSQL(t *testing.T, prepare bool, params ...string) {
	t.Helper()
	storetest.Run(t, func(t *testing.T) idempotency.Store {
		pg := testserver.Postgres(t)
		db := pg.Open(t, params...)
		if err := oncemill.Migrate(t.Context(), db, pg.Config, idempotency.Migrations, idempotency.QuotaMigrations); err != nil {
			t.Fatal(err)
		}
		store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: pg.Config, Prepare: prepare})
		if err != nil {
			t.Fatal(err)
		}
		return store
	})
}

func TestStore_OnSQLite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) idempotency.Store {
		db := testserver.SQLite(t)
		if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, idempotency.Migrations, idempotency.QuotaMigrations); err != nil {
			t.Fatal(err)
		}
		store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return store
	})
}
