package inbox_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// testDB is a database with oncemill's tables and a table of effects. That has no
// unique constraint, so an effect that happens twice shows.
type testDB struct {
	db  *sql.DB
	tap *tap
	dsn string
	cfg oncemill.Config
	box *outbox.Outbox
}

// testDBs are the databases that the suite runs on. The first three differ in what the server
// and the driver do by default.
var testDBs = map[string]func(*testing.T) *testDB{
	"postgresql": func(t *testing.T) *testDB { return postgres(t, "binary_parameters=yes") },
	"postgresql_text_repeatable_read": func(t *testing.T) *testDB {
		return postgres(t, "default_transaction_isolation=repeatable read")
	},
	"sqlite": func(t *testing.T) *testDB { return sqliteAt(t, migratedSQLite(t)) },
}

func onEachDB(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for _, name := range append(testserver.OneOf(t, "postgresql", "postgresql_text_repeatable_read"), "sqlite") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, testDBs[name](t))
		})
	}
}

// onADB is onEachDB for what does not depend on the database: a short run has one of them.
func onADB(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for _, name := range testserver.OneOf(t, "postgresql", "postgresql_text_repeatable_read", "sqlite") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, testDBs[name](t))
		})
	}
}

func postgres(t *testing.T, params ...string) *testDB {
	t.Helper()
	pg := testserver.Postgres(t)
	return newTestDB(t, testserver.Driver(), pg.URL(t, params...), pg.Config)
}

func sqliteAt(t *testing.T, path string) *testDB {
	t.Helper()
	return newTestDB(t, &sqlite.Driver{}, oncemill.SQLiteDSN(path), oncemill.Config{Dialect: oncemill.SQLite})
}

var migrations = []oncemill.Migrations{outbox.Migrations, inbox.Migrations}

// migratedSQLite is where a test on SQLite begins.
var migratedSQLite = testserver.SQLiteCopies(func(db *sql.DB) error {
	return oncemill.Migrate(context.Background(), db, oncemill.Config{}, migrations...)
})

func newTestDB(t *testing.T, d driver.Driver, dsn string, cfg oncemill.Config) *testDB {
	t.Helper()
	p := &testDB{tap: &tap{driver: d, dsn: dsn}, dsn: dsn, cfg: cfg}
	p.db = openTap(t, p.tap)
	if err := oncemill.Migrate(t.Context(), p.db, cfg, migrations...); err != nil {
		t.Fatal(err)
	}
	p.exec(t, `create table effects (message_id text not null, note text not null default '')`)
	box, err := outbox.New(p.pool(t), outbox.Config{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	p.box = box
	p.tap.sent()
	return p
}

func openTap(t *testing.T, through *tap) *sql.DB {
	t.Helper()
	db := sql.OpenDB(through)
	db.SetMaxIdleConns(8)
	t.Cleanup(func() {
		defer func() {
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		}()
		// One whose transaction was out of time may still be rolling back.
		testserver.Eventually(t, "all connections are given back", func() bool { return db.Stats().InUse == 0 })
	})
	return db
}

// pool returns what the library is given; see testserver.Pool.
func (p *testDB) pool(t *testing.T) *sql.DB {
	t.Helper()
	if p.cfg.Dialect == oncemill.SQLite {
		return p.db
	}
	return testserver.Pool(p.db, func() *sql.DB { return openTap(t, p.tap) })
}

// inbox returns an inbox of the consumer "stock"; change may be nil.
func (p *testDB) inbox(t *testing.T, change func(*inbox.Config)) *inbox.Inbox {
	t.Helper()
	cfg := inbox.Config{Consumer: "stock", Database: p.cfg, Outbox: p.box, Retry: inbox.Retry{Tries: 1}}
	if change != nil {
		change(&cfg)
	}
	in, err := inbox.New(p.pool(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func (p *testDB) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	resolved, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.db.ExecContext(t.Context(), resolved.Expand(query), args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func (p *testDB) count(t *testing.T, query string, args ...any) (n int) {
	t.Helper()
	resolved, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.db.QueryRowContext(t.Context(), resolved.Expand(query), args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// expect checks how many effects, ids and produced messages are committed.
func (p *testDB) expect(t *testing.T, effects, ids, produced int) {
	t.Helper()
	got := [3]int{
		p.count(t, `select count(*) from effects`),
		p.count(t, `select count(*) from {{inbox}}`),
		p.count(t, `select count(*) from {{outbox}}`),
	}
	if want := [3]int{effects, ids, produced}; got != want {
		t.Errorf("effects, ids, produced messages: got %v, want %v", got, want)
	}
}

// deliver is one delivery of a message with this id. Nothing is ever returned to
// the router.
func deliver(t *testing.T, in *inbox.Inbox, id string, h message.HandlerFunc) error {
	t.Helper()
	return deliverMessage(t, in, message.NewMessageWithContext(t.Context(), id, nil), h)
}

func deliverMessage(t *testing.T, in *inbox.Inbox, msg *message.Message, h message.HandlerFunc) error {
	t.Helper()
	produced, err := in.Middleware(h)(msg)
	if len(produced) != 0 {
		t.Errorf("the router was given %d messages to publish", len(produced))
	}
	return err
}

// effect is a handler that leaves one effect.
func effect(msg *message.Message) ([]*message.Message, error) {
	return nil, addEffect(msg)
}

func addEffect(msg *message.Message) error {
	return handlerExec(msg, `insert into effects (message_id) values ($1)`, msg.UUID)
}

func handlerExec(msg *message.Message, query string, args ...any) error {
	tx, err := handlerTx(msg.Context())
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(msg.Context(), query, args...)
	return err
}

func handlerTx(ctx context.Context) (oncemill.Tx, error) {
	tx, ok := inbox.TxFromContext(ctx)
	if !ok {
		return nil, errors.New("no transaction in the context")
	}
	return tx, nil
}

func expectError(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got error %v, want %v", err, want)
	}
}

func expectNoError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// expectSent checks the first words of what was sent since the last look.
func (p *testDB) expectSent(t *testing.T, want ...string) {
	t.Helper()
	if got := firstWords(p.tap.sent()); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("statements sent: got %s, want %s", strings.Join(got, ", "), strings.Join(want, ", "))
	}
}

func migrateRelay(t *testing.T, p *testDB) error {
	t.Helper()
	return oncemill.Migrate(t.Context(), p.db, p.cfg, audit.Migrations, dlq.Migrations, relay.Migrations)
}
