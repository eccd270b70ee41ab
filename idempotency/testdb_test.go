package idempotency_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// testDB is a database with oncemill's tables and a table of effects. That has no
// unique constraint, so an effect that happens twice shows.
type testDB struct {
	driver string
	dsn    string
	db     *sql.DB
	cfg    oncemill.Config
	store  *idempotency.SQLStore
	box    *outbox.Outbox

	prepare bool
}

func onPostgres(t *testing.T, params ...string) *testDB {
	t.Helper()
	pg := testserver.Postgres(t)
	dsn := pg.URL(t, append(params, "binary_parameters=yes")...)
	return newTestDB(t, &testDB{driver: testserver.DriverName(), dsn: dsn, cfg: pg.Config})
}

var migrations = []oncemill.Migrations{outbox.Migrations, idempotency.Migrations, idempotency.QuotaMigrations}

// migratedSQLite is where a test on SQLite begins.
var migratedSQLite = testserver.SQLiteCopies(func(db *sql.DB) error {
	return oncemill.Migrate(context.Background(), db, oncemill.Config{}, migrations...)
})

func onSQLite(t *testing.T) *testDB {
	t.Helper()
	return newTestDB(t, &testDB{driver: "sqlite", dsn: oncemill.SQLiteDSN(migratedSQLite(t)), cfg: oncemill.Config{Dialect: oncemill.SQLite}})
}

var testDBs = map[string]func(*testing.T) *testDB{
	"postgresql": func(t *testing.T) *testDB { return onPostgres(t) },
	"sqlite":     onSQLite,
}

func onEachDB(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for name, open := range testDBs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func newTestDB(t *testing.T, p *testDB) *testDB {
	t.Helper()
	var err error
	if p.db, err = sql.Open(p.driver, p.dsn); err != nil {
		t.Fatal(err)
	}
	p.db.SetMaxIdleConns(16)
	t.Cleanup(func() {
		if n := p.db.Stats().InUse; n != 0 {
			t.Errorf("%d connections were not given back", n)
		}
		_ = p.db.Close()
	})
	if err := oncemill.Migrate(t.Context(), p.db, p.cfg, migrations...); err != nil {
		t.Fatal(err)
	}
	p.exec(t, `create table effects (name text not null)`)
	p.open(t)
	return p
}

// open makes store and outbox on the pool.
func (p *testDB) open(t *testing.T) {
	t.Helper()
	var storeErr, boxErr error
	p.store, storeErr = idempotency.NewSQLStore(p.db, idempotency.StoreConfig{Database: p.cfg, Prepare: p.prepare})
	p.box, boxErr = outbox.New(p.db, outbox.Config{Database: p.cfg})
	if err := errors.Join(storeErr, boxErr); err != nil {
		t.Fatal(err)
	}
}

// engine returns one for a single tenant, that logs nothing; change may be nil.
func (p *testDB) engine(t *testing.T, change func(*idempotency.Config)) *idempotency.Engine {
	t.Helper()
	return newEngine(t, p.store, change)
}

func newEngine(t *testing.T, store idempotency.Store, change func(*idempotency.Config)) *idempotency.Engine {
	t.Helper()
	cfg := idempotency.Config{Scope: conformance.Scope, Logger: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	engine, err := idempotency.New(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return engine
}

func (p *testDB) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := p.db.ExecContext(t.Context(), p.expand(t, query), args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func (p *testDB) count(t *testing.T, query string, args ...any) (n int) {
	t.Helper()
	if err := p.db.QueryRowContext(t.Context(), p.expand(t, query), args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func (p *testDB) expand(t *testing.T, query string) string {
	t.Helper()
	resolved, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return resolved.Expand(query)
}

// sqlEffects are effects in the transaction of the request, or where there is
// none, at once.
type sqlEffects struct {
	db     *sql.DB
	box    *outbox.Outbox
	outbox string // quoted name of its table
}

func (p *testDB) effects(t *testing.T) sqlEffects {
	t.Helper()
	return newSQLEffects(p.db, p.box)
}

func newSQLEffects(db *sql.DB, box *outbox.Outbox) sqlEffects {
	return sqlEffects{db: db, box: box, outbox: database.Of(box.Config().Database).Table("outbox")}
}

func (e sqlEffects) Add(ctx context.Context, name string) error {
	const insert = `insert into effects (name) values ($1)`
	if tx, ok := idempotency.TxFromContext(ctx); ok {
		_, err := tx.ExecContext(ctx, insert, name)
		return err
	}
	return e.box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error { // waits for its turn on SQLite
		_, err := tx.ExecContext(ctx, insert, name)
		return err
	})
}

func (e sqlEffects) Publish(ctx context.Context, name string) error {
	publish := func(ctx context.Context) error {
		return e.box.ContextPublisher().Publish(name, message.NewMessageWithContext(ctx, watermill.NewUUID(), nil))
	}
	if _, ok := idempotency.TxFromContext(ctx); ok {
		return publish(ctx)
	}
	return e.box.RunInTx(ctx, func(ctx context.Context, _ *sql.Tx) error { return publish(ctx) })
}

func (e sqlEffects) Count(ctx context.Context, name string) (c conformance.Counts, err error) {
	err = errors.Join(
		e.db.QueryRowContext(ctx, `select count(*) from effects where name = $1`, name).Scan(&c.Effects),
		e.db.QueryRowContext(ctx, `select count(*) from `+e.outbox+` where topic = $1`, name).Scan(&c.Messages), //nolint:gosec // the name comes from Config
	)
	return c, err
}

// probe serves a probe on p in this process.
func (p *testDB) probe(t *testing.T, transactional bool, change func(*idempotency.Config)) (url string, engine *idempotency.Engine) {
	t.Helper()
	cfg := probeConfig()
	engine = p.engine(t, func(c *idempotency.Config) {
		*c = cfg
		if change != nil {
			change(c)
		}
		cfg = *c
	})
	server := httptest.NewServer(conformance.NewProbe(engine, p.effects(t), capabilitiesOf(cfg, transactional)))
	t.Cleanup(server.Close)
	return server.URL, engine
}

func probeConfig() idempotency.Config {
	return idempotency.Config{
		Scope:     conformance.Scope,
		Logger:    testLogger(),
		Timeout:   8 * time.Second, // a handler that a test holds must not use it up on a busy machine
		Failures:  idempotency.FailureConfig{Lease: 10 * time.Second},
		Requests:  idempotency.RequestConfig{MaxBody: 2 << 20},
		Responses: idempotency.ResponseConfig{MaxSize: 200_000},
		Answers:   idempotency.AnswerConfig{StatusPath: "/status/"},
	}
}

func capabilitiesOf(cfg idempotency.Config, transactional bool) conformance.Capabilities {
	return conformance.Capabilities{
		Transactional: transactional, Timeout: cfg.Timeout, MaxBody: cfg.Requests.MaxBody, MaxResponse: cfg.Responses.MaxSize,
		Canonical: cfg.Requests.Body == idempotency.BodyJSON, FailuresUnknown: !transactional && cfg.Failures.Failed == idempotency.FailedUnknown,
	}
}

// testLogger is silent unless ONCEMILL_TEST_LOG is set.
func testLogger() *slog.Logger {
	if os.Getenv("ONCEMILL_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}
