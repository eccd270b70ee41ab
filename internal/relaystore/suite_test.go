package relaystore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// fixture is a store of a test's own, and the lease of a lane.
type fixture struct {
	Store
	db  *sql.DB
	box *outbox.Outbox
	f   Fence // of the lane
}

const testLane = 5

// eachStore runs the conformance suite's test on both databases, and on PostgreSQL
// under the isolation levels that a database may have as its default, but for the
// highest, which forgives more than the one below it.
func eachStore(t *testing.T, test func(t *testing.T, p *fixture)) {
	t.Parallel()
	for _, level := range testserver.OneOf(t, "read committed", "repeatable read") {
		t.Run("PostgreSQL "+level, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			test(t, newFixture(t, pg.Open(t, "default_transaction_isolation="+level), pg.Config, 0))
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, newFixture(t, testserver.OpenSQLite(t, migratedSQLite(t)), oncemill.Config{}, 0))
	})
}

func newFixture(t testing.TB, db *sql.DB, cfg oncemill.Config, history time.Duration) *fixture {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, cfg, migrations...); err != nil {
		t.Fatal(err)
	}
	p := &fixture{db: db}
	p.use(t, cfg, history)
	if _, err := outboxqueue.Of(p.box).Maintain(t.Context(), func(context.Context, *sql.Tx) (bool, error) { return true, nil }); err != nil {
		t.Fatal(err)
	}
	p.f = p.own(t, "owner")
	return p
}

var migrations = []oncemill.Migrations{outbox.Migrations, audit.Migrations, dlq.Migrations, {Name: "relay", FS: Migrations}}

// migratedSQLite is where a test on SQLite begins.
var migratedSQLite = testserver.SQLiteCopies(func(db *sql.DB) error {
	return oncemill.Migrate(context.Background(), db, oncemill.Config{}, migrations...)
})

func openStore(box *outbox.Outbox) Store {
	cfg := box.Config()
	return Open(box.DB(), database.Of(cfg.Database))
}

// sqliteNow is the time of SQLite in microseconds.
const sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

func (p *fixture) use(t testing.TB, cfg oncemill.Config, history time.Duration) {
	t.Helper()
	box, err := outbox.New(p.db, outbox.Config{Database: cfg, History: history, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	p.box, p.Store = box, openStore(box)
}

// own makes owner the owner of the lane, from nobody or a former one.
func (p *fixture) own(t testing.TB, owner string) Fence {
	t.Helper()
	p.exec(t, `update {{relay_leases}} set owner = '', lease_until = `+p.longAgo()+` where lane = $1`, testLane)
	if _, err := p.Take(t.Context(), owner, []int{testLane}, 1, longTerm); err != nil {
		t.Fatal(err)
	}
	return Fence{testLane, owner, int64(p.count(t, `select epoch from {{relay_leases}} where lane = $1`, testLane))}
}

func (p *fixture) sqlite() bool { return p.box.Config().Database.Dialect == oncemill.SQLite }

func (p *fixture) longAgo() string {
	if p.sqlite() {
		return "0"
	}
	return "timestamptz 'epoch'"
}

func (p *fixture) exec(t testing.TB, text string, args ...any) {
	t.Helper()
	if _, err := p.db.ExecContext(t.Context(), database.Of(p.box.Config().Database).Expand(text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func (p *fixture) count(t testing.TB, text string, args ...any) (n int) {
	t.Helper()
	if err := p.db.QueryRowContext(t.Context(), database.Of(p.box.Config().Database).Expand(text), args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return n
}

// key returns the i-th key of the lane; 0 is none.
func laneKey(i int) string {
	if i == 0 {
		return ""
	}
	for n, found := 0, 0; ; n++ {
		if key := fmt.Sprint("k", n); outbox.Lane(key, "") == testLane {
			if found++; found == i {
				return key
			}
		}
	}
}

// publish commits messages of the lane, named "key/n", and returns their rows.
func (p *fixture) publish(t testing.TB, names ...string) []outboxstore.Row {
	t.Helper()
	msgs := make([]*message.Message, len(names))
	for i, name := range names {
		msgs[i] = message.NewMessage(name, []byte("payload of "+name))
		if key, _, ok := strings.Cut(name, "/"); ok {
			outbox.SetKey(msgs[i], key)
		}
	}
	return p.publishAll(t, msgs)
}

func (p *fixture) publishAll(t testing.TB, msgs []*message.Message) []outboxstore.Row {
	t.Helper()
	err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return p.box.Publisher(tx).Publish("orders", msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
	var mine []outboxstore.Row
	for _, r := range p.owed(t) {
		if slices.ContainsFunc(msgs, func(m *message.Message) bool { return m.UUID == r.MessageID }) {
			mine = append(mine, r)
		}
	}
	if len(mine) != len(msgs) {
		t.Fatalf("%d of %d messages are in the lane", len(mine), len(msgs))
	}
	return mine
}

// named returns n names of messages of a key.
func named(key string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s/%d", key, i)
	}
	return names
}

// loose returns n ids of messages without a key that are in the lane.
func loose(n int) []string {
	var names []string
	for i := 0; len(names) < n; i++ {
		if name := fmt.Sprint("m", i); outbox.Lane("", name) == testLane {
			names = append(names, name)
		}
	}
	return names
}

func (p *fixture) owed(t testing.TB) []outboxstore.Row {
	t.Helper()
	rows, err := outboxqueue.Of(p.box).Read(t.Context(), outboxstore.ReadRequest{Lanes: []int{testLane}, Rows: 1 << 20, Bytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// failing makes a failure of a row of the outbox.
func failing(r outboxstore.Row, v Fate) Failure {
	return Failure{Ref: r.Ref, Attempt: 1, Class: "refused", Text: "too large: " + r.MessageID, Fate: v, Fingerprint: dlqstore.Fingerprint("relay", "refused", "too large: "+r.MessageID, r.MessageID)}
}

// failingAgain makes the next failure of a parked row.
func failingAgain(r Row, v Fate) Failure {
	f := failing(r.Row, v)
	f.Retrying, f.Attempt = true, r.Attempts+1
	return f
}

func (p *fixture) mustFail(t testing.TB, failures []Failure, followers ...outboxstore.Row) {
	t.Helper()
	retried(t, func() error { return p.Fail(t.Context(), p.f, failures, refsOf(followers)) })
}

func refsOf(rows []outboxstore.Row) []outboxstore.Ref {
	refs := make([]outboxstore.Ref, len(rows))
	for i, r := range rows {
		refs[i] = r.Ref
	}
	return refs
}

// due looks for what is due of all topics.
func (p *fixture) due(ctx context.Context, r DueRequest) ([]Row, time.Duration, error) {
	r.Topics, r.Bytes = 1000, 1<<30
	found, err := p.Due(ctx, r)
	return found.Rows, found.Next, err
}

// known identifies rows of parked.
func (p *fixture) known(t testing.TB, ids ...int64) (known []outboxstore.Known) {
	t.Helper()
	for _, id := range ids {
		row, _, found, err := p.Find(t.Context(), testLane, id)
		if err != nil || !found {
			t.Fatalf("row %d: found %v, %v", id, found, err)
		}
		known = append(known, row.Known())
	}
	return known
}

func (p *fixture) mustDue(t testing.TB, heads, rows int, known ...int64) ([]Row, time.Duration) {
	t.Helper()
	var due []Row
	var next time.Duration
	retried(t, func() (err error) {
		due, next, err = p.due(t.Context(), DueRequest{Lanes: []int{testLane}, Known: p.known(t, known...), Heads: heads, Rows: rows})
		return err
	})
	return due, next
}

func (p *fixture) expectDue(t testing.TB, want ...string) []Row {
	t.Helper()
	due, _ := p.mustDue(t, 100, 100)
	if got := dueNames(due); !slices.Equal(got, want) {
		t.Fatalf("due are %v, want %v", got, want)
	}
	return due
}

func dueNames(rows []Row) []string {
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = r.MessageID
	}
	return names
}

func (p *fixture) mustRemove(t testing.TB, rows ...Row) []Key {
	t.Helper()
	refs := make([]outboxstore.Ref, len(rows))
	for i, r := range rows {
		refs[i] = r.Ref
	}
	removal, err := p.Remove(t.Context(), refs)
	if err != nil || removal.Missed != 0 {
		t.Fatalf("remove: %d missed, %v", removal.Missed, err)
	}
	return removal.Ended
}

func (p *fixture) keys(t testing.TB) []Key {
	t.Helper()
	keys, err := p.Keys(t.Context(), allLanes())
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func expectErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

func TestRetries_FindsOtherTopicsAmongTheNewestRows(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, named(laneKey(1), 5)...)
		a := rows[0].Topic
		p.exec(t, `update {{outbox}} set topic = 'b' where id = $1`, rows[2].ID)
		for _, c := range []struct {
			topics []string
			rows   int
			want   map[int]int64
		}{
			{[]string{a}, 3, map[int]int64{testLane: rows[2].ID}},
			{[]string{a}, 2, map[int]int64{}},
			{[]string{"b"}, 5, map[int]int64{testLane: rows[4].ID}},
			{[]string{a, "b"}, 5, map[int]int64{}},
		} {
			found, err := p.FindOtherTopics(t.Context(), []int{testLane, testLane + 1}, c.topics, c.rows)
			if err != nil || !maps.Equal(found, c.want) {
				t.Errorf("other than %v among %d: %v, %v; want %v", c.topics, c.rows, found, err, c.want)
			}
		}
	})
}

var eventually = testserver.Eventually

// removed is what Remove of a fixture has done.
type removed struct {
	Ended  []Key
	Missed int
}

// Remove removes rows as relays do.
func (p *fixture) Remove(ctx context.Context, rows []outboxstore.Ref) (done removed, err error) {
	done.Missed, err = outboxqueue.Of(p.box).MoveOrDelete(ctx, func(ctx context.Context, move bool) (int, error) {
		removal, err := p.Store.Remove(ctx, rows, move)
		done.Ended = append(done.Ended, removal.Ended...)
		return removal.Rows, err
	})
	return done, err
}
