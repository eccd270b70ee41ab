package relay_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"maps"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// maxWait is how long a test waits before it fails.
const maxWait = testserver.MaxWait

var quiet = slog.New(slog.DiscardHandler)

// testDB is a migrated database for one test.
type testDB struct {
	db     *sql.DB
	cfg    oncemill.Config // resolved
	driver string
	dsn    string                                       // for other processes
	open   func(t testing.TB, params ...string) *sql.DB // one more pool
}

func (p testDB) postgres() bool { return p.cfg.Dialect == oncemill.PostgreSQL }

// eachDatabase runs test on both databases.
func eachDatabase(t *testing.T, test func(t *testing.T, p testDB)) {
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		test(t, onPostgres(t))
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, onSQLite(t))
	})
}

// oneDatabase runs a test of what hardly depends on the database on the named one, and on
// each in a long run. Most tests of relays do: what the databases do differently is in the
// tests of internal/relaystore and internal/outboxstore, which always run on both.
func oneDatabase(t *testing.T, name string, test func(t *testing.T, p testDB)) {
	if testserver.Long() {
		eachDatabase(t, test)
		return
	}
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		test(t, map[string]func(testing.TB) testDB{
			"PostgreSQL": func(t testing.TB) testDB { return onPostgres(t) }, "SQLite": onSQLite,
		}[name](t))
	})
}

func onPostgres(t testing.TB, params ...string) testDB {
	t.Helper()
	pg := testserver.Postgres(t)
	url := pg.URL(t, "binary_parameters=yes")
	return migrated(t, testDB{db: pg.Open(t, params...), cfg: pg.Config, driver: testserver.DriverName(), dsn: url, open: pg.Open})
}

// onServer returns a database on a PostgreSQL that belongs to the test.
func onServer(t testing.TB, server *testserver.PostgresServer) testDB {
	t.Helper()
	open := func(_ testing.TB, params ...string) *sql.DB { return server.Open(params...) }
	return migrated(t, testDB{db: open(t), driver: testserver.DriverName(), dsn: server.DSN(), open: open})
}

// migratedSQLite is where a test on SQLite begins.
var migratedSQLite = testserver.SQLiteCopies(func(db *sql.DB) error {
	return oncemill.Migrate(context.Background(), db, oncemill.Config{}, migrations...)
})

func onSQLite(t testing.TB) testDB {
	t.Helper()
	path := migratedSQLite(t)
	open := func(t testing.TB, _ ...string) *sql.DB { return testserver.OpenSQLite(t, path) }
	return resolved(t, testDB{db: open(t), driver: "sqlite", dsn: oncemill.SQLiteDSN(path), open: open})
}

var migrations = []oncemill.Migrations{outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations}

func migrated(t testing.TB, p testDB) testDB {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), p.db, p.cfg, migrations...); err != nil {
		t.Fatal(err)
	}
	return resolved(t, p)
}

func resolved(t testing.TB, p testDB) testDB {
	t.Helper()
	cfg, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p.cfg = cfg.Config()
	return p
}

// box returns an outbox without history, on the pool of the database.
func (p testDB) box(t testing.TB) *outbox.Outbox {
	t.Helper()
	pool := p.db
	if p.postgres() {
		pool = testserver.Pool(p.db, func() *sql.DB { return p.open(t) })
	}
	return p.boxOn(t, pool, outbox.NoHistory)
}

func (p testDB) boxOn(t testing.TB, db *sql.DB, history time.Duration) *outbox.Outbox {
	t.Helper()
	box, err := outbox.New(db, outbox.Config{Database: p.cfg, History: history, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return box
}

func (p testDB) execute(t testing.TB, statement string, args ...any) {
	t.Helper()
	for tries := 1; ; tries++ {
		_, err := p.db.ExecContext(t.Context(), database.Of(p.cfg).Expand(statement), args...)
		switch {
		case err == nil:
			return
		case sqlerr.Retryable(err) && tries < 10: // a deadlock with a worker, say
		default:
			t.Fatalf("%s: %v", statement, err)
		}
	}
}

func (p testDB) count(t testing.TB, query string, args ...any) int {
	t.Helper()
	n, err := countIn(t.Context(), p.db, database.Of(p.cfg).Expand(query), args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func countIn(ctx context.Context, db *sql.DB, query string, args ...any) (n int, err error) {
	err = db.QueryRowContext(ctx, query, args...).Scan(&n)
	return n, err
}

func (p testDB) owed(t testing.TB) int {
	t.Helper()
	return p.count(t, `select (select count(*) from {{outbox}}) + (select count(*) from {{parked}})`)
}

func (p testDB) awaitNothingOwed(t testing.TB) {
	t.Helper()
	owed := 0
	until(t, "nothing is owed", func() bool { owed = p.owed(t); return owed == 0 }, func() int64 { return int64(owed) })
}

// shares returns how many lanes each worker holds, by the workers' names.
func (p testDB) shares(t testing.TB) map[string]int {
	t.Helper()
	rows, err := p.db.QueryContext(t.Context(), database.Of(p.cfg).Expand(`
		select w.name, count(l.lane)
		from {{relay_workers}} w
		left join {{relay_leases}} l on l.owner = w.owner and l.lane >= 0
		group by w.name`))
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	shares := map[string]int{}
	for rows.Next() {
		var name string
		var n int
		if err := rows.Scan(&name, &n); err != nil {
			t.Fatal(err)
		}
		shares[name] = n
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return shares
}

// awaitShares waits until the workers hold as many lanes as wanted. One that holds none may
// have a row still: a worker that could not delete it as it stopped.
func (p testDB) awaitShares(t testing.TB, want map[string]int) {
	t.Helper()
	none := func(_ string, lanes int) bool { return lanes == 0 }
	want = maps.Clone(want)
	maps.DeleteFunc(want, none)
	eventually(t, fmt.Sprint("shares ", want), func() bool {
		shares := p.shares(t)
		maps.DeleteFunc(shares, none)
		return maps.Equal(shares, want)
	})
}

// outsideTransactions calls fn while no other process is in the middle of a
// transaction that writes to SQLite. One that is stopped there keeps the whole
// database waiting.
func (p testDB) outsideTransactions(t testing.TB, fn func()) {
	t.Helper()
	if p.postgres() {
		fn()
		return
	}
	tx, err := p.db.BeginTx(t.Context(), nil) // immediate
	if err != nil {
		t.Fatal(err)
	}
	fn()
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
}

// keyed returns n messages of one key, named "key/0" and so on from first.
func keyed(key string, first, n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(fmt.Sprintf("%s/%d", key, first+i), []byte("payload"))
		outbox.SetKey(msgs[i], key)
	}
	return msgs
}

// spread returns n messages for each of some keys, those of one key in order.
func spread(keys, each int) []*message.Message {
	var msgs []*message.Message
	for i := range each {
		for k := range keys {
			msgs = append(msgs, keyed(fmt.Sprint("key", k), i, 1)...)
		}
	}
	return msgs
}

// unkeyed returns n messages without a key.
func unkeyed(n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(watermill.NewUUID(), []byte("payload"))
	}
	return msgs
}

// keysOfLane returns n keys of one lane.
func keysOfLane(lane, n int) []string {
	var keys []string
	for i := 0; len(keys) < n; i++ {
		if key := fmt.Sprint("k", i); outbox.Lane(key, "") == lane {
			keys = append(keys, key)
		}
	}
	return keys
}

// commit publishes messages in a transaction of their own.
func commit(t testing.TB, box *outbox.Outbox, msgs ...*message.Message) {
	t.Helper()
	commitTo(t, box, "orders", msgs...)
}

func commitTo(t testing.TB, box *outbox.Outbox, topic string, msgs ...*message.Message) {
	t.Helper()
	err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return box.Publisher(tx).Publish(topic, msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

var eventually = testserver.Eventually

// unguarded lets the upkeep run without a lease.
func unguarded(context.Context, *sql.Tx) (bool, error) { return true, nil }
