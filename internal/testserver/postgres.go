package testserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	_ "github.com/lib/pq" // the driver "postgres"

	"github.com/oncemill/oncemill"
)

// PG is a place of a test's own on the shared PostgreSQL.
type PG struct {
	// DB is a pool whose unqualified names mean Schema.
	DB *sql.DB

	// DSN is the URL behind DB, without parameters that only lib/pq knows, so
	// that it serves other drivers and processes too.
	DSN string

	// Schema is for the business tables of the test. It exists and is empty.
	Schema string

	// Config names another schema, for oncemill's tables. It does not exist yet.
	Config oncemill.Config
}

// Postgres returns two schemas for t, one for its business tables and one for
// oncemill's. Both are dropped when t ends, so everything that is in a
// transaction must have ended by then.
func Postgres(t testing.TB) PG {
	t.Helper()
	shared, err := sharedPostgres()
	if err != nil {
		t.Fatal(err)
	}
	name := uniqueName(t)
	pg := PG{
		Schema: "app_" + name,
		Config: oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "mill_" + name},
	}
	pg.DSN = withParams(t, shared, "search_path="+pg.Schema, "application_name=oncemill_test")
	if err := execOnce(t.Context(), shared, "create schema "+pg.Schema); err != nil {
		t.Fatalf("testserver: %v", err)
	}
	// Registered before the pools are opened, so it runs after they are closed.
	t.Cleanup(func() {
		// A transaction that is still open would block the drop for ever.
		url := withParams(t, shared, "lock_timeout=10s")
		for _, schema := range []string{pg.Schema, pg.Config.Schema} {
			if err := execOnce(context.WithoutCancel(t.Context()), url, "drop schema if exists "+schema+" cascade"); err != nil {
				t.Errorf("testserver: drop schema (is a transaction of the test still open?): %v", err)
			}
		}
	})
	pg.DB = pg.Open(t)
	return pg
}

// Open returns one more pool (lib/pq), closed when t ends. Each parameter is
// "name=value" of the connection, for example
// "default_transaction_isolation=repeatable read".
func (pg PG) Open(t testing.TB, params ...string) *sql.DB {
	t.Helper()
	return openPostgres(t, pg.DSN, params...)
}

// openPostgres adds binary_parameters, which lib/pq needs to execute a
// statement with arguments in one round trip.
func openPostgres(t testing.TB, dsn string, params ...string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", withParams(t, dsn, append([]string{"binary_parameters=yes"}, params...)...))
	if err != nil {
		t.Fatalf("testserver: %v", err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("testserver: close the pool: %v", err)
		}
	})
	return db
}

// withParams sets parameters ("name=value") in the URL of a PostgreSQL.
func withParams(t testing.TB, dsn string, params ...string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatalf("testserver: the URL of the PostgreSQL cannot be parsed")
	}
	query := u.Query()
	for _, param := range params {
		name, value, ok := strings.Cut(param, "=")
		if !ok {
			t.Fatalf("testserver: parameter %q is not name=value", param)
		}
		query.Set(name, value)
	}
	// lib/pq reads a plus sign literally.
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	return u.String()
}

// execOnce executes one statement on a connection of its own, which leaves no
// goroutine behind.
func execOnce(ctx context.Context, dsn, statement string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.ExecContext(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}
