package inboxstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fixture is the store of a consumer.
type fixture struct {
	inboxstore.Store
	db    *sql.DB
	where database.Database
	calls *bounded.Calls
}

// each runs a test of the contract of Store on both databases, and on PostgreSQL under
// the isolation levels that an inbox may have.
func each(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	eachDatabase(t, []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelSerializable}, test)
}

func eachDatabase(t *testing.T, levels []sql.IsolationLevel, test func(t *testing.T, f *fixture)) {
	t.Helper()
	t.Parallel()
	for _, level := range levels {
		t.Run("PostgreSQL "+level.String(), func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			test(t, newFixture(t, pg.Open(t), pg.Config, level))
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, newFixture(t, testserver.SQLite(t), oncemill.Config{}, sql.LevelDefault))
	})
}

func newFixture(t *testing.T, db *sql.DB, cfg oncemill.Config, level sql.IsolationLevel) *fixture {
	t.Helper()
	must(t, oncemill.Migrate(t.Context(), db, cfg, oncemill.Migrations{Name: "inbox", FS: inboxstore.Migrations}))
	where, err := database.Resolve(db, cfg)
	must(t, err)
	config := inboxstore.Config{Consumer: "stock", Timeout: time.Minute, Isolation: level}
	if where.Dialect == oncemill.PostgreSQL {
		config.LockTimeout, config.GroupLockTimeout = 50*time.Millisecond, 50*time.Millisecond
	}
	config = config.Resolve(where.Dialect, func(field, value, problem string) { t.Errorf("%s = %s: %s", field, value, problem) })
	return &fixture{inboxstore.Open(db, where, config), db, where, bounded.New(10)}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) exec(t *testing.T, text string) {
	t.Helper()
	if _, err := f.db.ExecContext(t.Context(), f.where.Expand(text)); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func (f *fixture) count(t *testing.T, text string) (n int) {
	t.Helper()
	must(t, f.db.QueryRowContext(t.Context(), f.where.Expand(text)).Scan(&n))
	return n
}

func (f *fixture) begin(t *testing.T) *boundtx.Tx {
	t.Helper()
	tx, err := f.Begin(t.Context(), f.calls)
	must(t, err)
	t.Cleanup(tx.Rollback)
	return tx
}

// inTx runs do in a transaction. It commits if do returns true.
func (f *fixture) inTx(t *testing.T, do func(ctx context.Context, tx *sql.Tx) bool) {
	t.Helper()
	tx := f.begin(t)
	if do(t.Context(), tx.Raw) {
		must(t, tx.Commit(boundtx.CommitLimit))
	}
	tx.Rollback()
}

// handle claims ids as a message that has been handled does, and reports which were new.
func (f *fixture) handle(t *testing.T, ids ...string) (claimed []bool) {
	t.Helper()
	for _, id := range ids {
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
			ok, err := f.Claim(ctx, tx, id, nil)
			must(t, err)
			claimed = append(claimed, ok)
			if ok {
				must(t, f.Seal(ctx, tx, id))
			}
			return ok
		})
	}
	return claimed
}

func TestClaim_TakesAnIDOnce(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool { // rolled back
			ok, err := f.Claim(ctx, tx, "a", nil)
			if err != nil || !ok {
				t.Errorf("claimed %v, %v", ok, err)
			}
			return false
		})
		if got := f.handle(t, "a", "a", "b"); !slices.Equal(got, []bool{true, false, true}) {
			t.Errorf("claimed %v", got)
		}
	})
}

func TestClaim_ReportsThatAnotherTransactionHoldsTheID(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		first := f.begin(t)
		ok, err := f.Claim(t.Context(), first.Raw, "a", nil)
		if err != nil || !ok {
			t.Fatalf("claimed %v, %v", ok, err)
		}
		claim := func(claim func(ctx context.Context, tx *sql.Tx) error) error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			tx, err := f.Begin(ctx, f.calls) // SQLite waits here
			if err != nil {
				if f.Writers() == 1 && errors.Is(err, context.DeadlineExceeded) {
					return inboxstore.ErrBeingHandled
				}
				return err
			}
			defer tx.Rollback()
			return claim(ctx, tx.Raw)
		}
		if err := claim(func(ctx context.Context, tx *sql.Tx) error { _, err := f.Claim(ctx, tx, "a", nil); return err }); !errors.Is(err, inboxstore.ErrBeingHandled) {
			t.Errorf("claimed alone: %v", err)
		}
		group := []inboxstore.Claim{{ID: "a"}, {ID: "b"}}
		if err := claim(func(ctx context.Context, tx *sql.Tx) error { _, err := f.ClaimGroup(ctx, tx, group); return err }); !errors.Is(err, inboxstore.ErrBeingHandled) {
			t.Errorf("claimed in a group: %v", err)
		}
		must(t, f.Seal(t.Context(), first.Raw, "a"))
		must(t, first.Commit(boundtx.CommitLimit))
		if got := f.handle(t, "a"); got[0] {
			t.Error("claimed twice")
		}
	})
}

func TestSeal_IsRequiredToCommit(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for name, claim := range map[string]func(ctx context.Context, tx *sql.Tx) error{
			"alone": func(ctx context.Context, tx *sql.Tx) error { _, err := f.Claim(ctx, tx, "a", nil); return err },
			"in a group": func(ctx context.Context, tx *sql.Tx) error {
				_, err := f.ClaimGroup(ctx, tx, []inboxstore.Claim{{ID: "a"}})
				return err
			},
		} {
			tx := f.begin(t)
			must(t, claim(t.Context(), tx.Raw))
			if err := tx.Commit(boundtx.CommitLimit); err == nil {
				t.Errorf("%s: committed without a seal", name)
			}
			tx.Rollback()
			if n := f.count(t, `select count(*) from {{inbox}}`); n != 0 {
				t.Errorf("%s: %d ids", name, n)
			}
		}
	})
}

func TestSeal_NoticesThatTheTransactionHasEnded(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.handle(t, "before")
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool { // another one than the claim's
			if err := f.Seal(ctx, tx, "a"); !errors.Is(err, inboxstore.ErrTxEnded) {
				t.Errorf("sealed: %v", err)
			}
			if err := f.Seal(ctx, tx, "before"); !errors.Is(err, inboxstore.ErrTxEnded) {
				t.Errorf("sealed what had committed: %v", err)
			}
			return false
		})
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
			_, err := f.Claim(ctx, tx, "a", nil)
			must(t, err)
			must(t, f.Seal(ctx, tx, "a"))
			if err := f.Seal(ctx, tx, "a"); !errors.Is(err, inboxstore.ErrTxEnded) {
				t.Errorf("sealed twice: %v", err)
			}
			return false
		})
	})
}

func TestClaimGroup_ReturnsNewIDs(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.handle(t, "b")
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
			claimed, err := f.ClaimGroup(ctx, tx, []inboxstore.Claim{{ID: "a", Fingerprint: []byte{1}}, {ID: "b"}, {ID: "c"}})
			must(t, err)
			if len(claimed) != 2 || !claimed["a"] || !claimed["c"] {
				t.Errorf("claimed %v", claimed)
			}
			must(t, f.SealGroup(ctx, tx, claimed))
			return true
		})
		if got := f.handle(t, "a", "c"); got[0] || got[1] {
			t.Errorf("claimed again %v", got)
		}
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
			for _, c := range []struct {
				id          string
				fingerprint []byte
				same        bool
			}{{"a", []byte{1}, true}, {"a", []byte{2}, false}, {"b", []byte{2}, true}} {
				if same, err := f.SameFingerprint(ctx, tx, c.id, c.fingerprint); err != nil || same != c.same {
					t.Errorf("%s, %v: same %v, %v", c.id, c.fingerprint, same, err)
				}
			}
			return false
		})
	})
}

// die claims an id for a dead letter.
func (f *fixture) die(t *testing.T, id string) {
	t.Helper()
	f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
		ok, err := f.Claim(ctx, tx, id, nil)
		if err != nil || !ok {
			t.Fatalf("claimed %v, %v", ok, err)
		}
		must(t, errors.Join(f.MarkDead(ctx, tx, id), f.Seal(ctx, tx, id)))
		return true
	})
}

func TestReopen_RemovesTheIDsOfDeadLettersOnly(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.die(t, "dead")
		f.handle(t, "handled")
		for id, want := range map[string]bool{"dead": true, "handled": false} {
			f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
				must(t, errors.Join(f.LimitLockWait(ctx, tx), f.Reopen(ctx, tx, id)))
				ok, err := f.Claim(ctx, tx, id, nil)
				if err != nil || ok != want {
					t.Errorf("%s: claimed %v, %v", id, ok, err)
				}
				return false
			})
		}
	})
}

func TestHandled_LeavesOutTheIDsOfDeadLetters(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.die(t, "dead")
		f.handle(t, "handled")
		if got, err := f.Handled(t.Context(), []string{"dead", "handled", "unknown"}); err != nil || !slices.Equal(got, []string{"handled"}) {
			t.Errorf("%q, %v", got, err)
		}
	})
}

func TestStarts_AreCountedUntilTheyEnd(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		ctx := t.Context()
		start := func(id string, replay, recorded, unended bool) {
			t.Helper()
			s, err := f.RecordStart(ctx, id, replay)
			if err != nil || s.Recorded != recorded || s.Unended != unended || s.Early != 0 {
				t.Errorf("%s: %+v, %v", id, s, err)
			}
		}
		charge := func(want int) {
			t.Helper()
			if n, err := f.Charge(ctx, "a"); err != nil || n != want {
				t.Errorf("charged %d, %v; want %d", n, err, want)
			}
		}
		charge(0)
		start("a", false, true, false)
		start("a", false, true, true)
		charge(1)
		charge(2)
		must(t, f.Discharge(ctx, "a"))
		charge(2)
		must(t, errors.Join(f.RecordEnd(ctx, "a", true), f.RecordEnd(ctx, "a", false), f.RecordEnd(ctx, "a", false)))
		charge(2)
		start("a", false, true, false)
		f.handle(t, "handled")
		start("handled", false, false, false)
		start("handled", true, false, false)
		f.die(t, "dead")
		start("dead", false, false, false)
		start("dead", true, true, false)
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
			must(t, f.DeleteFailures(ctx, tx, "a"))
			return true
		})
		charge(0)
	})
}

func TestFailures_AreCountedAndTheLastTenKept(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		ctx := t.Context()
		_, err := f.RecordStart(ctx, "a", false)
		must(t, err)
		fail := func(failure inboxstore.Failure) inboxstore.Record {
			t.Helper()
			failure.Again = func(r inboxstore.Record) time.Duration { return time.Duration(r.Failures) * time.Hour }
			rec, err := f.RecordFailure(ctx, "a", failure)
			must(t, err)
			return rec
		}
		failed := func(failures, unavailable int) {
			t.Helper()
			f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
				a, b, err := f.FailedDeliveries(ctx, tx, "a")
				if err != nil || a != failures || b != unavailable {
					t.Errorf("%d and %d deliveries have failed, %v; want %d and %d", a, b, err, failures, unavailable)
				}
				return false
			})
		}
		failed(0, 0)
		var rec inboxstore.Record
		for i := range 12 {
			rec = fail(inboxstore.Failure{Text: fmt.Sprint("error ", i+1), Recorded: i == 0})
		}
		if rec.Failures != 12 || rec.Unavailable != 0 || len(rec.Errors) != 10 || rec.Errors[0].Error != "error 3" || rec.Errors[9].Error != "error 12" || rec.Again != 12*time.Hour {
			t.Errorf("got %+v", rec)
		}
		fail(inboxstore.Failure{Unavailable: true})
		if rec = fail(inboxstore.Failure{Uncounted: true}); rec.Failures != 12 || rec.Unavailable != 1 {
			t.Errorf("got %+v", rec)
		}
		failed(12, 1)
		s, err := f.RecordStart(ctx, "a", false)
		if err != nil || s.Unended || s.Early < 11*time.Hour || s.Early > 12*time.Hour {
			t.Errorf("started %+v, %v", s, err)
		}
	})
}

func TestAdvance_KeepsTheOrderOfAKey(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for _, c := range []struct {
			key  string
			seq  int64
			skip bool
			want inboxstore.Position
		}{
			{"k", 7, false, inboxstore.PositionNext}, // the first may have any number
			{"k", 7, false, inboxstore.PositionPassed},
			{"k", 9, false, inboxstore.PositionEarly},
			{"k", 8, false, inboxstore.PositionNext},
			{"k", 10, true, inboxstore.PositionNext},
			{"k", 9, true, inboxstore.PositionPassed},
			{"l", 1, false, inboxstore.PositionNext},
			{"last", math.MaxInt64, false, inboxstore.PositionNext},
			{"last", 1, false, inboxstore.PositionPassed},
			{"last", math.MaxInt64, true, inboxstore.PositionPassed},
			{"first", math.MinInt64, false, inboxstore.PositionNext},
			{"first", math.MaxInt64, false, inboxstore.PositionEarly},
			{"first", math.MinInt64, true, inboxstore.PositionPassed},
		} {
			f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
				if got, err := f.Advance(ctx, tx, c.key, c.seq, c.skip); err != nil || got != c.want {
					t.Errorf("%+v: got %v, %v", c, got, err)
				}
				return true
			})
		}
	})
}

func TestRetried_FindsAnEarlierMessageThatComesAgain(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
			_, err := f.Advance(ctx, tx, "k", 1, false)
			must(t, err)
			return true
		})
		retried := func(key string, seq int64, wait time.Duration) (found bool) {
			f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
				var err error
				found, err = f.Retried(ctx, tx, key, seq, wait)
				must(t, err)
				return false
			})
			return found
		}
		seq := int64(2)
		_, err := f.RecordFailure(t.Context(), "two", inboxstore.Failure{Key: "k", Seq: &seq, Again: func(inboxstore.Record) time.Duration { return -time.Minute }})
		must(t, err)
		if !retried("k", 3, time.Hour) || retried("k", 3, time.Second) || retried("k", 2, time.Hour) || retried("l", 3, time.Hour) {
			t.Error("found the wrong message, or not the right one")
		}
	})
}

func TestCountRefused_CountsWithinATime(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		count := func(topic string, n int, within time.Duration, want int64) {
			t.Helper()
			f.inTx(t, func(ctx context.Context, tx *sql.Tx) bool {
				if got, err := f.CountRefused(ctx, tx, topic, "malformed", n, within); err != nil || got != want {
					t.Errorf("%s: counted %d, %v; want %d", topic, got, err, want)
				}
				return true
			})
		}
		count("orders", 2, time.Hour, 2)
		count("orders", 3, time.Hour, 5)
		count("bills", 1, time.Hour, 1)
		count("orders", 4, -time.Hour, 4)
		if n := f.count(t, `select total from {{inbox_refused}} where topic = 'orders'`); n != 9 {
			t.Errorf("in total %d", n)
		}
	})
}

func TestStore_ReturnsTheDatabasesTime(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		must(t, f.Ping(t.Context()))
		if now, err := f.Now(t.Context()); err != nil || time.Since(now).Abs() > time.Minute {
			t.Errorf("now %v, %v", now, err)
		}
	})
}
