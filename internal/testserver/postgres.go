package testserver

import (
	"context"
	"database/sql"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/lib/pq" // the driver "postgres"

	"github.com/oncemill/oncemill"
)

// PG is a test database: two schemas on the shared PostgreSQL.
type PG struct {
	// DB is a pool with Schema as its search path.
	DB *sql.DB

	// DSN is the URL of DB, without parameters that only one driver knows. URL adds those of
	// the driver in use.
	DSN string

	// Schema is for the business tables of the test. It exists and is empty.
	Schema string

	// Config names another schema, for oncemill's tables. It does not exist yet.
	Config oncemill.Config

	server string // the URL of the server, or of the pooler in front of it
}

// Postgres returns two schemas for t, one for its business tables and one for oncemill's.
// Both are dropped when t ends. All transactions must have ended by then.
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
		server: shared,
	}
	if err := upkeep.exec(t.Context(), shared, "create schema "+pg.Schema); err != nil {
		t.Fatalf("testserver: %v", err)
	}
	// Registered before the pools are opened, so it runs after they are closed.
	t.Cleanup(func() {
		statements := "drop schema if exists " + pg.Schema + ", " + pg.Config.Schema + " cascade;"
		if behindPgBouncer() {
			statements += strings.ReplaceAll(dropRoles, "SCHEMA", pg.Schema)
		}
		if err := upkeep.exec(context.WithoutCancel(t.Context()), shared, statements); err != nil {
			t.Errorf("testserver: drop schemas and roles (is a transaction of the test still open?): %v", err)
		}
	})
	pg.DSN = pg.dsn(t)
	pg.DB = pg.Open(t)
	return pg
}

// Open returns one more pool, closed when t ends. Each parameter is "name=value"
// of the connection, for example "default_transaction_isolation=repeatable read".
func (pg PG) Open(t testing.TB, params ...string) *sql.DB {
	t.Helper()
	return open(t, pg.URL(t, append([]string{"binary_parameters=yes"}, params...)...))
}

// URL returns DSN with parameters, for Driver. Parameters that only lib/pq knows are omitted
// for other drivers.
func (pg PG) URL(t testing.TB, params ...string) string {
	t.Helper()
	return forDriver(t, pg.dsn(t, params...))
}

func open(t testing.TB, url string) *sql.DB {
	t.Helper()
	db, err := sql.Open(DriverName(), url)
	if err != nil {
		t.Fatalf("testserver: %v", err)
	}
	db.SetMaxIdleConns(8) // as docs/operations.md recommends
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

// upkeep makes and drops what tests get on the shared PostgreSQL. Main closes it.
var upkeep processPool

// processPool is a pool of connections that the tests of a process share.
type processPool struct {
	mu sync.Mutex // guards db
	db *sql.DB
}

// exec executes statements in one transaction. It waits ten seconds for a lock: that of a
// transaction that nobody ends would never be free.
func (p *processPool) exec(ctx context.Context, dsn, statements string) error {
	p.mu.Lock()
	if p.db == nil {
		db, err := sql.Open("postgres", dsn)
		if err != nil {
			p.mu.Unlock()
			return err
		}
		p.db = db
	}
	db := p.db
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err := db.ExecContext(ctx, "set lock_timeout = '10s';"+statements)
	return err
}

func (p *processPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.db == nil {
		return nil
	}
	db := p.db
	p.db = nil
	return db.Close()
}
