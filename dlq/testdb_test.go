package dlq_test

import (
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// testDB is a database with dead letters in it.
type testDB struct {
	*dlq.Store
	stored dlqstore.Store // what an inbox uses
	db     *sql.DB
	cfg    oncemill.Config // resolved
}

// eachDB runs the conformance suite's test on both databases, and on PostgreSQL under one or, in
// a long run, all of the isolation levels that a database may have as its default.
func eachDB(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Parallel()
	for _, level := range testserver.OneOf(t, "read committed", "repeatable read", "serializable") {
		t.Run("PostgreSQL "+level, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			test(t, newTestDB(t, pg.Open(t, "default_transaction_isolation="+level), pg.Config))
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, newTestDB(t, testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db")), oncemill.Config{}))
	})
}

func newTestDB(t testing.TB, db *sql.DB, cfg oncemill.Config) *testDB {
	t.Helper()
	must(t, oncemill.Migrate(t.Context(), db, cfg, audit.Migrations, dlq.Migrations))
	resolved, err := database.Resolve(db, cfg)
	must(t, err)
	store, err := dlq.New(db, dlq.Config{Database: cfg})
	must(t, err)
	return &testDB{store, dlqstore.Open(db, resolved), db, resolved.Config()}
}

func (p *testDB) exec(t testing.TB, text string, args ...any) {
	t.Helper()
	if _, err := p.db.ExecContext(t.Context(), database.Of(p.cfg).Expand(text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// ago is a time in the table's own terms.
func (p *testDB) ago(d time.Duration) string {
	if p.cfg.Dialect == oncemill.SQLite {
		return fmt.Sprintf("cast(unixepoch('subsec') * 1000000 as integer) - %d", d.Microseconds())
	}
	return fmt.Sprintf("clock_timestamp() - %d * interval '1 microsecond'", d.Microseconds())
}

// letter is what a test writes into the table.
type letter struct {
	state, source, consumer, topic, key, messageID, reason, fingerprint string
	died                                                                time.Duration // ago
}

// write writes a letter as a relay or a consumer does, and returns its id.
func (p *testDB) write(t testing.TB, l letter) (id int64) {
	t.Helper()
	for field, byDefault := range map[*string]string{
		&l.state: "dead", &l.source: "relay", &l.topic: "orders", &l.messageID: "m", &l.reason: "refused", &l.fingerprint: "f",
	} {
		if *field == "" {
			*field = byDefault
		}
	}
	lane, row, closed := any(3), any(77), "null"
	if l.source == "consumer" {
		lane, row = nil, nil
	}
	if l.state == "replayed" || l.state == "discarded" {
		closed = p.ago(l.died)
	}
	text := fmt.Sprintf(`
		insert into {{dead_letters}} (state, source, consumer, lane, row_id, topic, key, message_id, payload, metadata, reason, error, attempts, errors, fingerprint, held,
			created_at, died_at, closed_at)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 'no queue', 3, $12, $13, $14, %s, %s, %s) returning id`,
		p.ago(time.Hour+l.died), p.ago(l.died), closed)
	err := p.db.QueryRowContext(t.Context(), database.Of(p.cfg).Expand(text), l.state, l.source, l.consumer, lane, row, l.topic, l.key, l.messageID,
		[]byte("payload"), []byte(`{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01","a":"b"}`), l.reason,
		`[{"at":1700000000000000,"class":"refused","text":"once"},{"at":1700000001000000,"class":"crashed","text":"twice"}]`,
		l.fingerprint, l.state == "held" || l.state == "discarding").Scan(&id)
	must(t, err)
	return id
}

func (p *testDB) states(t testing.TB, ids ...int64) []dlq.State {
	t.Helper()
	states := make([]dlq.State, len(ids))
	for i, id := range ids {
		l, err := p.Get(t.Context(), id)
		must(t, err)
		states[i] = l.State
	}
	return states
}

func (p *testDB) expectStates(t testing.TB, ids []int64, want ...dlq.State) {
	t.Helper()
	if got := p.states(t, ids...); !slices.Equal(got, want) {
		t.Errorf("states %v, want %v", got, want)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
