package dlqstore_test

import (
	"database/sql"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fixture is a database with dead letters.
type fixture struct {
	dlqstore.Store
	db    *sql.DB
	where database.Database
}

// each runs a test of the contract of Store on both databases, and on PostgreSQL under
// one or, in a long run, all of the isolation levels that a database may have as its default.
func each(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	eachDatabase(t, testserver.OneOf(t, "read committed", "repeatable read"), test)
}

func eachDatabase(t *testing.T, levels []string, test func(t *testing.T, f *fixture)) {
	t.Helper()
	t.Parallel()
	for _, level := range levels {
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
	must(t, oncemill.Migrate(t.Context(), db, cfg, oncemill.Migrations{Name: "audit", FS: auditstore.Migrations}, oncemill.Migrations{Name: "dlq", FS: dlqstore.Migrations},
		oncemill.Migrations{Name: "outbox", FS: outboxstore.Migrations}, oncemill.Migrations{Name: "relay", FS: relaystore.Migrations}))
	where, err := database.Resolve(db, cfg)
	must(t, err)
	return &fixture{dlqstore.Open(db, where), db, where}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) exec(t *testing.T, text string, args ...any) {
	t.Helper()
	if _, err := f.db.ExecContext(t.Context(), f.where.Expand(text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// add adds a dead letter of the consumer stock, and returns its id.
func (f *fixture) add(t *testing.T, l dlqstore.Letter) int64 {
	t.Helper()
	l.Consumer = "stock"
	f.inTx(t, func(tx *sql.Tx) error { return f.Add(t.Context(), tx, &l) })
	newest, err := f.List(t.Context(), dlqstore.Filter{Limit: 1})
	must(t, err)
	return newest[0].ID
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

func (f *fixture) expectStates(t *testing.T, want map[int64]string) {
	t.Helper()
	got, err := f.States(t.Context(), slices.Collect(maps.Keys(want)))
	must(t, err)
	if !maps.Equal(got, want) {
		t.Errorf("states %v, want %v", got, want)
	}
}

// replaying adds a dead letter that is replaying, and returns it with its token.
func (f *fixture) replaying(t *testing.T) (id int64, token string) {
	t.Helper()
	id = f.add(t, dlqstore.Letter{Payload: []byte("p")})
	_, err := f.Replay(t.Context(), []int64{id}, "ada", "")
	must(t, err)
	token, err = f.ReplayToken(t.Context(), id)
	must(t, err)
	return id, token
}

func TestStore_ReturnsAddedLetters(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		made := time.UnixMicro(1700000000000000).UTC()
		in := dlqstore.Letter{
			Topic: "orders", MessageID: "m", Key: "k", Payload: []byte{0, 255}, Metadata: map[string]string{"a": "<b>"}, CreatedAt: made,
			Reason: "failed", Error: "no stock", Stack: "main.go:1", Tries: 3, Attempts: []dlqstore.Attempt{{made, "failed", "once"}},
		}
		id := f.add(t, in)
		l, err := f.Get(t.Context(), id)
		must(t, err)
		if l.State != "dead" || l.Version != 1 || l.Source != "consumer" || l.Consumer != "stock" || l.Lane != -1 || l.RowID != 0 ||
			l.Topic != in.Topic || l.MessageID != in.MessageID || l.Key != in.Key || string(l.Payload) != string(in.Payload) || l.Size != 2 ||
			!maps.Equal(l.Metadata, in.Metadata) || l.CreatedAt != made || l.DiedAt.IsZero() || l.Reason != in.Reason || l.Error != in.Error ||
			l.Stack != in.Stack || l.Tries != in.Tries || !slices.Equal(l.Attempts, in.Attempts) || len(l.Fingerprint) != 16 {
			t.Errorf("got %+v", l)
		}
		listed, err := f.List(t.Context(), dlqstore.Filter{Limit: 10})
		if err != nil || len(listed) != 1 || listed[0].ID != id || listed[0].Payload != nil || listed[0].Metadata != nil || listed[0].Attempts != nil {
			t.Errorf("listed %+v, %v", listed, err)
		}
		for _, call := range []func() error{
			func() error { _, err := f.Get(t.Context(), id+1); return err },
			func() error { _, err := f.ReplayToken(t.Context(), id); return err },
			func() error { _, err := f.CheckReplay(t.Context(), id, ""); return err },
		} {
			if err := call(); !errors.Is(err, dlqstore.ErrNotFound) {
				t.Errorf("got %v", err)
			}
		}
	})
}

func TestStore_ListsByEachIndexInBothDirections(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		first := f.add(t, dlqstore.Letter{Topic: "orders", MessageID: "m", Key: "k", Error: "e"})
		second := f.add(t, dlqstore.Letter{Topic: "orders", MessageID: "m", Key: "k", Error: "e"})
		f.add(t, dlqstore.Letter{Topic: "bills", MessageID: "n", Key: "l", Error: "other"})
		f.exec(t, `update {{dead_letters}} set consumer = 'mail', state = 'discarded', closed_at = died_at where topic = 'bills'`)
		l, err := f.Get(t.Context(), first)
		must(t, err)
		for _, filter := range []dlqstore.Filter{
			{MessageID: "m"},
			{Key: "k"},
			{Fingerprint: l.Fingerprint},
			{Consumer: "stock"},
			{Topic: "orders"},
			{States: []string{"dead"}},
			{States: []string{"dead", "held"}},
			{From: l.DiedAt, Until: l.DiedAt.Add(time.Hour), Topic: "orders"},
		} {
			filter.Limit = 1
			for _, want := range [][]int64{{second, first}, {first, second}} {
				filter.AfterDiedAt, filter.AfterID = time.Time{}, 0
				for _, id := range append(want, 0) {
					page, err := f.List(t.Context(), filter)
					must(t, err)
					if id == 0 {
						if len(page) > 0 {
							t.Errorf("%+v goes on with %d", filter, page[0].ID)
						}
						break
					}
					if len(page) != 1 || page[0].ID != id {
						t.Fatalf("%+v: got %v, want %d", filter, page, id)
					}
					filter.AfterDiedAt, filter.AfterID = page[0].DiedAt, page[0].ID
				}
				filter.OldestFirst = true
			}
		}
	})
}

func TestStore_ACommandIsAcceptedOnce(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		ids := []int64{f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})}
		var mu sync.Mutex
		var accepted []int64
		var callers sync.WaitGroup
		for i := range 8 {
			callers.Go(func() {
				for {
					did, err := f.Replay(t.Context(), ids, "ada", "")
					if sqlerr.Retryable(err) {
						continue
					}
					if err != nil {
						t.Errorf("caller %d: %v", i, err)
					}
					mu.Lock()
					defer mu.Unlock()
					accepted = append(accepted, did...)
					return
				}
			})
		}
		callers.Wait()
		if slices.Sort(accepted); !slices.Equal(accepted, ids) {
			t.Errorf("accepted %v of %v", accepted, ids)
		}
		l, err := f.Get(t.Context(), ids[0])
		if err != nil || l.Version != 2 || l.ActedBy != "ada" || l.ActedAt.IsZero() || !l.ClosedAt.IsZero() {
			t.Errorf("got %+v, %v", l, err)
		}
		f.exec(t, `update {{dead_letters}} set state = 'held', held = $2 where id = $1`, ids[1], true)
		did, err := f.Discard(t.Context(), append(ids, 99), "ada", "test")
		if slices.Sort(did); err != nil || !slices.Equal(did, ids) {
			t.Errorf("discarded %v, %v", did, err)
		}
		f.expectStates(t, map[int64]string{ids[0]: "discarded", ids[1]: "discarding"})
		if did, err := f.Discard(t.Context(), ids, "bob", "test"); err != nil || len(did) > 0 {
			t.Errorf("discarded again: %v, %v", did, err)
		}
	})
}

func TestStore_AReplayEndsOnlyWithItsTokenConsumerAndPayload(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id, token := f.replaying(t)
		_, other := f.replaying(t)
		if len(token) != 32 || token == other {
			t.Errorf("tokens %q and %q", token, other)
		}
		end := func(consumer string, id int64, token, payload string) (ended bool) {
			f.inTx(t, func(tx *sql.Tx) (err error) {
				ended, err = f.EndReplay(t.Context(), tx, consumer, id, token, []byte(payload))
				return err
			})
			return ended
		}
		for _, forged := range [][]string{{"mail", token, "p"}, {"stock", "", "p"}, {"stock", other, "p"}, {"stock", token, "q"}, {"stock", token, ""}} {
			if end(forged[0], id, forged[1], forged[2]) {
				t.Errorf("ended by %q", forged)
			}
		}
		f.expectStates(t, map[int64]string{id: "replaying"})
		if !end("stock", id, token, "p") || end("stock", id, token, "p") {
			t.Error("a replay ends once")
		}
		f.expectStates(t, map[int64]string{id: "replayed"})
		if l, err := f.CheckReplay(t.Context(), id, token); err != nil || l.State != "replayed" {
			t.Errorf("a late copy is not recognized: %+v, %v", l, err)
		}
		if _, err := f.CheckReplay(t.Context(), id, other); !errors.Is(err, dlqstore.ErrNotFound) {
			t.Errorf("another's token: %v", err)
		}
	})
}

func TestStore_AReplayEndsWithTheTransaction(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id, token := f.replaying(t)
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		if ended, err := f.EndReplay(t.Context(), tx, "stock", id, token, []byte("p")); err != nil || !ended {
			t.Errorf("ended %v, %v", ended, err)
		}
		must(t, tx.Rollback())
		f.expectStates(t, map[int64]string{id: "replaying"})
	})
}

func TestStore_PurgesOldClosedLetters(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		open, young, old := f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})
		must(t, errors.Join(discard(t, f, young), discard(t, f, old)))
		hour := map[oncemill.Dialect]string{oncemill.SQLite: "3600000000", oncemill.PostgreSQL: "interval '1 hour'"}[f.where.Dialect]
		f.exec(t, `update {{dead_letters}} set closed_at = closed_at - 2 * `+hour+` where id = $1`, old)
		if n, err := f.Purge(t.Context(), time.Hour); err != nil || n != 1 {
			t.Errorf("purged %d, %v", n, err)
		}
		f.expectStates(t, map[int64]string{open: "dead", young: "discarded"})
		if states, err := f.States(t.Context(), []int64{old}); err != nil || len(states) > 0 {
			t.Errorf("still there: %v, %v", states, err)
		}
	})
}

func discard(t *testing.T, f *fixture, id int64) error {
	_, err := f.Discard(t.Context(), []int64{id}, "ada", "test")
	return err
}

func TestStore_CleansTexts(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		long := strings.Repeat("x", 5000)
		l, err := f.Get(t.Context(), f.add(t, dlqstore.Letter{Topic: "a\x00b", Error: long, MessageID: "a\xffb"}))
		must(t, err)
		if l.Topic != "a�b" || l.MessageID != "a�b" || l.Error != long[:4096]+"…" {
			t.Errorf("got %q, %q, %d bytes", l.Topic, l.MessageID, len(l.Error))
		}
	})
}
