package testserver_test

import (
	"database/sql"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"

	"github.com/oncemill/oncemill/internal/database"
)

func queryText(t *testing.T, db *sql.DB, query string) string {
	t.Helper()
	var text string
	if err := db.QueryRowContext(t.Context(), query).Scan(&text); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return text
}

func execute(t *testing.T, db *sql.DB, statement string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func TestPostgres_GivesEveryTestItsOwnSchemas(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"one", "two", "a name that is much too long for an identifier"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			resolved, err := database.Resolve(pg.DB, pg.Config)
			if err != nil {
				t.Fatalf("config is not valid: %v", err)
			}
			execute(t, pg.DB, "create schema "+resolved.Schema)
			execute(t, pg.DB, "create table orders (id bigint)")
			execute(t, pg.Open(t, "application_name=second"), "insert into orders values (1)")
			if got := queryText(t, pg.DB, "select schemaname from pg_tables where tablename = 'orders' and schemaname = current_schema()"); got != pg.Schema {
				t.Errorf("table is in schema %q, want %q", got, pg.Schema)
			}
		})
	}
}

func TestPostgres_DropsBothSchemasAtTheEnd(t *testing.T) {
	t.Parallel()
	var gone testserver.PG
	t.Run("inner", func(t *testing.T) {
		gone = testserver.Postgres(t)
		execute(t, gone.DB, "create schema "+gone.Config.Schema)
		execute(t, gone.DB, "create table "+gone.Config.Schema+".outbox (id bigint)")
	})
	var left int
	err := testserver.Postgres(t).DB.QueryRowContext(t.Context(),
		"select count(*) from pg_namespace where nspname in ($1, $2)", gone.Schema, gone.Config.Schema).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d schemas left, %v", left, err)
	}
}

func TestPostgres_PassesConnectionParameters(t *testing.T) {
	t.Parallel()
	db := testserver.Postgres(t).Open(t, "default_transaction_isolation=repeatable read")
	if got := queryText(t, db, "show transaction_isolation"); got != "repeatable read" {
		t.Errorf("isolation is %q", got)
	}
}

func TestPostgres_IsDurableAndAllowsTwoPhaseCommit(t *testing.T) {
	t.Parallel()
	db := testserver.Postgres(t).DB
	if got := queryText(t, db, "show fsync"); got != "on" {
		t.Errorf("fsync is %s", got)
	}
	if got := queryText(t, db, "select (current_setting('max_prepared_transactions')::int >= 10)::text"); got != "true" {
		t.Error("fewer than ten prepared transactions")
	}
}

func TestSQLite_GivesEveryTestItsOwnFile(t *testing.T) {
	t.Parallel()
	for range 2 {
		db := testserver.SQLite(t)
		execute(t, db, "create table orders (id integer primary key)")
		if got := queryText(t, db, "pragma journal_mode"); got != "wal" {
			t.Errorf("journal mode is %s", got)
		}
	}
}
