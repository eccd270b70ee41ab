package outbox_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// fixture is a database with an outbox in it.
type fixture struct {
	db    *sql.DB
	tap   *tap
	dsn   string                        // what tap opens
	url   func(params ...string) string // the same with more parameters (PostgreSQL)
	cfg   outbox.Config
	box   *outbox.Outbox
	queue *outboxqueue.Queue
}

// databases are what the conformance suite runs on. The second differs from the
// first in everything that a server or a driver may do by default.
var databases = map[string]func(*testing.T) *fixture{
	"postgresql": func(t *testing.T) *fixture { return onPostgres(t, "binary_parameters=yes") },
	"postgresql_other_defaults": func(t *testing.T) *fixture {
		pg := testserver.Postgres(t)
		pg.Config.Prefix = "mill_"
		url := pg.URL(t, "default_transaction_isolation=repeatable read", "timezone=Asia/Kathmandu")
		return newFixture(t, testserver.Driver(), url, outbox.Config{Database: pg.Config})
	},
	"sqlite": onSQLite,
}

func onEachDatabase(t *testing.T, test func(t *testing.T, p *fixture)) {
	t.Helper()
	t.Parallel()
	for _, name := range append(testserver.OneOf(t, "postgresql", "postgresql_other_defaults"), "sqlite") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, databases[name](t))
		})
	}
}

func onPostgres(t *testing.T, params ...string) *fixture {
	t.Helper()
	pg := testserver.Postgres(t)
	p := newFixture(t, testserver.Driver(), pg.URL(t, params...), outbox.Config{Database: pg.Config})
	p.url = func(more ...string) string { return pg.URL(t, append(params, more...)...) }
	return p
}

// migratedSQLite is where a test on SQLite begins.
var migratedSQLite = testserver.SQLiteCopies(func(db *sql.DB) error {
	return oncemill.Migrate(context.Background(), db, oncemill.Config{}, outbox.Migrations)
})

func onSQLite(t *testing.T) *fixture {
	t.Helper()
	return newFixture(t, &sqlite.Driver{}, oncemill.SQLiteDSN(migratedSQLite(t)), outbox.Config{Database: oncemill.Config{Dialect: oncemill.SQLite}})
}

func newFixture(t *testing.T, d driver.Driver, dsn string, cfg outbox.Config) *fixture {
	t.Helper()
	p := &fixture{tap: &tap{driver: d, dsn: dsn}, dsn: dsn, cfg: cfg}
	p.db = openTap(t, p.tap)
	if err := oncemill.Migrate(t.Context(), p.db, cfg.Database, outbox.Migrations); err != nil {
		t.Fatal(err)
	}
	p.use(t, p.db, nil)
	if !p.isSQLite() {
		// A slow machine may pass a day over.
		made := 0
		eventually(t, "the history has its days", func() bool {
			made += p.maintain(t).Made
			return made == 4
		})
	}
	p.tap.sent()
	return p
}

// use makes the outbox anew: on db, with the configuration changed.
func (p *fixture) use(t *testing.T, db *sql.DB, change func(*outbox.Config)) {
	t.Helper()
	if change != nil {
		change(&p.cfg)
	}
	pool := db
	if db == p.db && !p.isSQLite() {
		pool = testserver.Pool(db, func() *sql.DB { return openTap(t, p.tap) })
	}
	box, err := outbox.New(pool, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p.db, p.box, p.queue = db, box, outboxqueue.Of(box)
}

// open returns a pool on the same database, with more parameters (PostgreSQL).
func (p *fixture) open(t *testing.T, params ...string) *sql.DB {
	t.Helper()
	return openTap(t, &tap{driver: p.tap.driver, dsn: p.url(params...)})
}

func openTap(t *testing.T, through *tap) *sql.DB {
	t.Helper()
	db := sql.OpenDB(through)
	db.SetMaxIdleConns(8)
	t.Cleanup(func() {
		// database/sql rolls back what a context has ended on its own time.
		eventually(t, "all connections are given back", func() bool { return db.Stats().InUse == 0 })
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func (p *fixture) isSQLite() bool { return p.cfg.Database.Dialect == oncemill.SQLite }

// expand fills the names of the tables in.
func (p *fixture) expand(t *testing.T, text string) string {
	t.Helper()
	resolved, err := database.Resolve(p.db, p.cfg.Database)
	if err != nil {
		t.Fatal(err)
	}
	return resolved.Expand(text)
}

func (p *fixture) exec(t *testing.T, text string, args ...any) {
	t.Helper()
	if _, err := p.db.ExecContext(t.Context(), p.expand(t, text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func (p *fixture) count(t *testing.T, text string, args ...any) (n int) {
	t.Helper()
	if err := p.db.QueryRowContext(t.Context(), p.expand(t, text), args...).Scan(&n); err != nil {
		t.Errorf("%s: %v", text, err) // not Fatal: goroutines ask too
	}
	return n
}

// inTx runs fn in a transaction of the test's own.
func (p *fixture) inTx(t *testing.T, fn func(tx *sql.Tx)) {
	t.Helper()
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	fn(tx)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (p *fixture) publish(t *testing.T, msgs ...*message.Message) {
	t.Helper()
	p.publishTo(t, "orders", msgs...)
}

func (p *fixture) publishTo(t *testing.T, topic string, msgs ...*message.Message) {
	t.Helper()
	err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return p.box.Publisher(tx).Publish(topic, msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// read reads all lanes to their ends.
func (p *fixture) read(t *testing.T) []outboxstore.Row {
	t.Helper()
	return p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 1 << 20, Bytes: 1 << 30})
}

func (p *fixture) readAs(t *testing.T, req outboxstore.ReadRequest) []outboxstore.Row {
	t.Helper()
	rows, err := p.queue.Read(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (p *fixture) remove(t *testing.T, refs ...outboxstore.Ref) {
	t.Helper()
	removal, err := p.queue.Remove(t.Context(), refs)
	if err != nil || removal.Missed != 0 || len(removal.Locked) != 0 {
		t.Fatalf("remove: %+v, %v", removal, err)
	}
}

func (p *fixture) maintain(t *testing.T) outboxstore.Maintained {
	t.Helper()
	done, err := p.queue.Maintain(t.Context(), always)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// always is the guard of a caller without a lease.
func always(context.Context, *sql.Tx) (bool, error) { return true, nil }

func allLanes() []int {
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	return lanes
}

func newMessage(id, key string) *message.Message {
	msg := message.NewMessage(id, message.Payload("payload of "+id))
	outbox.SetKey(msg, key)
	return msg
}

// messages returns n unkeyed messages named after prefix.
func messages(prefix string, n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = newMessage(fmt.Sprintf("%s-%d", prefix, i), "")
	}
	return msgs
}

func ids(rows []outboxstore.Row) []string {
	out := make([]string, len(rows))
	for i, r := range rows {
		out[i] = r.MessageID
	}
	return out
}

func refs(rows []outboxstore.Row) []outboxstore.Ref {
	out := make([]outboxstore.Ref, len(rows))
	for i, r := range rows {
		out[i] = r.Ref
	}
	return out
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

func expectIDs(t *testing.T, rows []outboxstore.Row, want ...string) {
	t.Helper()
	if got := ids(rows); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got messages %v, want %v", got, want)
	}
}

var eventually = testserver.Eventually
