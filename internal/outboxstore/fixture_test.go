package outboxstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fixture is a database with an outbox.
type fixture struct {
	outboxstore.Store
	db    *sql.DB
	where database.Database
}

// each runs a test of the contract of Store on both databases, and on PostgreSQL under
// the isolation levels that a database may have as its default.
func each(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	t.Parallel()
	for _, level := range testserver.OneOf(t, "read committed", "repeatable read") {
		t.Run("PostgreSQL "+level, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			test(t, newFixture(t, pg.Open(t, "default_transaction_isolation="+level), pg.Config))
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, newFixture(t, testserver.SQLite(t), oncemill.Config{}))
	})
}

func newFixture(t *testing.T, db *sql.DB, cfg oncemill.Config) *fixture {
	t.Helper()
	must(t, oncemill.Migrate(t.Context(), db, cfg, oncemill.Migrations{Name: "outbox", FS: outboxstore.Migrations}))
	where, err := database.Resolve(db, cfg)
	must(t, err)
	f := &fixture{outboxstore.Open(db, where), db, where}
	missing, _, err := f.HistoryDays(t.Context(), 1)
	must(t, err)
	for _, day := range missing {
		_, err := f.AddHistoryDay(t.Context(), holds, day)
		must(t, err)
	}
	return f
}

// holds and lost are guards of a caller with a lease and of one without.
func holds(context.Context, *sql.Tx) (bool, error) { return true, nil }
func lost(context.Context, *sql.Tx) (bool, error)  { return false, nil }

var limits = shorttx.Limits{Lock: time.Second, Statement: 10 * time.Second}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) isSQLite() bool { return f.where.Dialect == oncemill.SQLite }

func (f *fixture) exec(t *testing.T, text string, args ...any) {
	t.Helper()
	if _, err := f.db.ExecContext(t.Context(), f.where.Expand(text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func (f *fixture) count(t *testing.T, table string) (n int) {
	t.Helper()
	must(t, f.db.QueryRowContext(t.Context(), f.where.Expand(`select count(*) from {{`+table+`}}`)).Scan(&n))
	return n
}

// inTx commits what do has done.
func (f *fixture) inTx(t *testing.T, do func(tx *sql.Tx) error) {
	t.Helper()
	tx, err := f.db.BeginTx(t.Context(), nil)
	must(t, err)
	defer tx.Rollback()
	must(t, do(tx))
	must(t, tx.Commit())
}

// message returns a row of lane 3.
func message(id, key string) outboxstore.Row {
	return outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, MessageID: id}, Topic: "orders", Key: key, Payload: []byte("payload of " + id), Metadata: []byte(`{}`)}
}

// insert writes rows of lane 3, and returns them as they are read.
func (f *fixture) insert(t *testing.T, ids ...string) []outboxstore.Row {
	t.Helper()
	rows := make([]outboxstore.Row, len(ids))
	for i, id := range ids {
		rows[i] = message(id, "key of "+id)
	}
	f.inTx(t, func(tx *sql.Tx) error { return f.Insert(t.Context(), tx, rows) })
	return f.read(t)
}

func numbered(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprint(prefix, i)
	}
	return ids
}

func (f *fixture) read(t *testing.T) []outboxstore.Row {
	t.Helper()
	rows, err := f.Read(t.Context(), outboxstore.ReadRequest{Lanes: []int{3}, Rows: 1000, Bytes: 1 << 30})
	must(t, err)
	return rows
}

func refs(rows []outboxstore.Row) []outboxstore.Ref {
	refs := make([]outboxstore.Ref, len(rows))
	for i, r := range rows {
		refs[i] = r.Ref
	}
	return refs
}

func expectIDs(t *testing.T, what string, rows []outboxstore.Row, want ...string) {
	t.Helper()
	got := make([]string, len(rows))
	for i, r := range rows {
		got[i] = r.MessageID
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// impostors are what is left of a row's identity if one part of it is another's.
func impostors(r outboxstore.Ref) map[string]outboxstore.Ref {
	lane, id, message, created := r, r, r, r
	lane.Lane++
	id.ID += 1000
	message.MessageID += "x"
	created.CreatedAt = r.CreatedAt.Add(time.Microsecond)
	return map[string]outboxstore.Ref{"lane": lane, "id": id, "message id": message, "creation time": created}
}
