package outboxstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

func TestStore_InsertKeepsTheOrder(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		ids := numbered("m", 250) // SQLite takes several statements
		rows := f.insert(t, ids...)
		expectIDs(t, "inserted", rows, ids...)
		if r := rows[7]; string(r.Payload) != "payload of m7" || r.Key != "key of m7" || r.Topic != "orders" || r.Hollow {
			t.Errorf("read %+v", r)
		}
		one, err := f.PrepareInsert(t.Context())
		must(t, err)
		defer one.Close()
		_, err = one.ExecContext(t.Context(), outboxstore.InsertArgs(message("prepared", ""))...)
		must(t, err)
		expectIDs(t, "prepared", f.read(t)[250:], "prepared")
	})
}

// A lane that a worker at rest did not look at would wait until something else is written.
func TestStore_LooksAtEveryLaneWhereNothingIsExpected(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for lane := range outboxstore.Lanes {
			name := fmt.Sprint("in lane ", lane)
			f.inTx(t, func(tx *sql.Tx) error {
				row := message(name, "")
				row.Lane = lane
				return f.Insert(t.Context(), tx, []outboxstore.Row{row})
			})
			rows, err := f.Read(t.Context(), outboxstore.ReadRequest{Lanes: []int{lane}, Rows: 1, Bytes: 1, Peek: true})
			must(t, err)
			expectIDs(t, name, rows, name)
		}
	})
}

func TestStore_ReadPassesOverWhatIsKnownOrBusy(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		rows := f.insert(t, "a", "b", "c", "d", "e")
		f.inTx(t, func(tx *sql.Tx) error {
			other := message("other", "")
			other.Lane, other.Topic = 1, "paused"
			return f.Insert(t.Context(), tx, []outboxstore.Row{other})
		})
		read := func(req outboxstore.ReadRequest) []outboxstore.Row {
			t.Helper()
			if req.Lanes == nil {
				req.Lanes = []int{3}
			}
			if req.Bytes == 0 {
				req.Bytes = 1 << 20
			}
			if req.Rows == 0 {
				req.Rows = 100
			}
			rows, err := f.Read(t.Context(), req)
			must(t, err)
			return rows
		}
		expectIDs(t, "two rows", read(outboxstore.ReadRequest{Rows: 2}), "a", "b")
		expectIDs(t, "one byte", read(outboxstore.ReadRequest{Bytes: 1}), "a")
		expectIDs(t, "lanes in the order of the request", read(outboxstore.ReadRequest{Lanes: []int{3, 1}, Rows: 2}), "a", "b", "other")
		expectIDs(t, "busy", read(outboxstore.ReadRequest{Busy: []string{"key of a", "key of c"}}), "b", "d", "e")
		expectIDs(t, "known", read(outboxstore.ReadRequest{Known: []outboxstore.Known{rows[0].Known(), rows[2].Known()}}), "b", "d", "e")
		again := rows[0].Known() // a row of a server that is gone
		again.CreatedAt = again.CreatedAt.Add(-time.Microsecond)
		expectIDs(t, "known by its id alone", read(outboxstore.ReadRequest{Known: []outboxstore.Known{again}, Rows: 1}), "a")
		expectIDs(t, "where none is expected", read(outboxstore.ReadRequest{Lanes: []int{0, 1}, Peek: true}), "other")
		expectIDs(t, "where none is", read(outboxstore.ReadRequest{Lanes: []int{0, 31}, Peek: true}))
		hollow := read(outboxstore.ReadRequest{Lanes: []int{1}, Hollow: []string{"paused"}})
		if len(hollow) != 1 || !hollow[0].Hollow || hollow[0].Payload != nil || hollow[0].Metadata != nil {
			t.Errorf("hollow: %+v", hollow)
		}
	})
}

func TestStore_ReadPieceIsOfTheRowAlone(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		row := f.insert(t, "a")[0]
		piece, err := f.ReadPiece(t.Context(), row.Ref, 3, 4)
		if string(piece) != "load" || err != nil {
			t.Errorf("got %q, %v", piece, err)
		}
		for other, ref := range impostors(row.Ref) {
			if piece, err := f.ReadPiece(t.Context(), ref, 3, 4); len(piece) > 0 || err != nil {
				t.Errorf("another %s: got %q, %v", other, piece, err)
			}
		}
	})
}

func TestStore_ReadAheadLeavesWhatWaitsForItsKey(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		rows := []outboxstore.Row{message("a/1", "a"), message("b/1", "b"), message("a/2", "a"), message("free", ""), message("c/1", "c"), message("b/2", "b")}
		f.inTx(t, func(tx *sql.Tx) error { return f.Insert(t.Context(), tx, rows) })
		stored := f.read(t)
		ahead := outboxstore.Ahead{Topics: []string{"orders"}, Look: 4, Scan: 100}
		req := outboxstore.ReadRequest{Lanes: []int{3}, Rows: 100, Bytes: 1 << 20}
		look := func() []outboxstore.Row {
			t.Helper()
			rows, err := f.ReadAhead(t.Context(), req, ahead)
			must(t, err)
			return rows
		}
		expectIDs(t, "the newest four", look(), "free", "c/1")
		req.Known = []outboxstore.Known{stored[0].Known()}
		expectIDs(t, "a is known", look(), "a/2", "free", "c/1")
		ahead.Scan = 6
		expectIDs(t, "not all is scanned", look(), "free")
		ahead.Unordered = true
		expectIDs(t, "keys do not order", look(), "a/2", "free", "c/1", "b/2")
	})
}

// ways are those to remove rows. A group is removed where it was read if that is possible.
var ways = map[string]func(t *testing.T, f *fixture, rows []outboxstore.Ref, move bool) (removed int){
	"where they were read": func(t *testing.T, f *fixture, rows []outboxstore.Ref, move bool) (removed int) {
		groups, rest := f.ByCTID(rows)
		for _, group := range groups {
			if done, err := f.RemoveAt(t.Context(), group, move); done {
				removed += len(group)
				must(t, err)
			}
		}
		return removed + f.remove(t, rest, move)
	},
	"waiting for locks": func(t *testing.T, f *fixture, rows []outboxstore.Ref, move bool) int {
		return f.remove(t, rows, move)
	},
	"skipping what is locked": func(t *testing.T, f *fixture, rows []outboxstore.Ref, move bool) int {
		removed, locked, err := f.Remove(t.Context(), rows, outboxstore.Removing{Move: move, SkipLocked: true})
		if must(t, err); len(locked) > 0 {
			t.Errorf("%d rows are locked", len(locked))
		}
		return removed
	},
}

func (f *fixture) remove(t *testing.T, rows []outboxstore.Ref, move bool) int {
	t.Helper()
	removed, _, err := f.Remove(t.Context(), rows, outboxstore.Removing{Move: move})
	must(t, err)
	return removed
}

func TestStore_RemoveMatchesTheWholeIdentity(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		kept := 0
		for way, remove := range ways {
			for _, move := range []bool{true, false} {
				rows := refs(f.insert(t, numbered("m", 100)...))
				for part := range impostors(rows[0]) {
					others := slices.Clone(rows)
					for i, r := range rows {
						others[i] = impostors(r)[part]
					}
					if n := remove(t, f, others, move); n != 0 {
						t.Errorf("%s: %d rows were removed as those of another %s", way, n, part)
					}
				}
				if n := remove(t, f, rows, move); n != len(rows) {
					t.Errorf("%s: %d rows were removed", way, n)
				}
				if n := remove(t, f, rows, move); n != 0 {
					t.Errorf("%s: %d rows were removed twice", way, n)
				}
				if n := len(f.read(t)); n != 0 {
					t.Errorf("%s: %d rows are left", way, n)
				}
				if move {
					kept += len(rows)
				}
				if n := f.count(t, "outbox_history"); n != kept {
					t.Errorf("%s: %d rows are in the history, want %d", way, n, kept)
				}
			}
		}
	})
}

// A group of which one row is another now stays as it is.
func TestStore_RemoveAtRemovesAllOrNothing(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		rows := refs(f.insert(t, numbered("m", 100)...))
		groups, _ := f.ByCTID(rows)
		if f.isSQLite() != (len(groups) == 0) {
			t.Fatalf("%d groups", len(groups))
		}
		for _, group := range groups {
			f.exec(t, `update {{outbox}} set topic = 'changed' where id = $1`, group[7].ID)
			done, err := f.RemoveAt(t.Context(), group, false)
			if must(t, err); done {
				t.Error("a row that was changed was removed")
			}
		}
		if n := len(f.read(t)); n != 100 {
			t.Errorf("%d rows are left", n)
		}
	})
}

func TestStore_RemoveReturnsWhatIsLocked(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if f.isSQLite() {
			return // it locks no rows
		}
		rows := refs(f.insert(t, "a", "b", "c"))
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		defer tx.Rollback()
		_, err = tx.ExecContext(t.Context(), f.where.Expand(`select from {{outbox}} where id = $1 for update`), rows[1].ID)
		must(t, err)
		if _, _, err := f.Remove(t.Context(), rows, outboxstore.Removing{}); !sqlerr.TimedOut(err) {
			t.Errorf("got %v", err)
		}
		removed, locked, err := f.Remove(t.Context(), rows, outboxstore.Removing{SkipLocked: true})
		if must(t, err); removed != 2 || len(locked) != 1 || locked[0].ID != rows[1].ID {
			t.Errorf("removed %d, locked %v", removed, locked)
		}
	})
}

// Whoever has lost the lease changes nothing.
func TestStore_NothingHappensWithoutTheLease(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		failure := errors.New("no answer")
		fails := func(context.Context, *sql.Tx) (bool, error) { return false, failure }
		f.schedule(t, time.Now().Add(-time.Hour), "due")
		f.remove(t, refs(f.insert(t, "old")), true)
		f.age(t)
		batch, err := f.Expired(t.Context(), holds, outboxstore.Expired{}, expired)
		if must(t, err); len(batch.Rows) != 1 {
			t.Fatalf("expired: %+v", batch)
		}
		before, err := f.LastID(t.Context())
		must(t, err)
		for _, guard := range []outboxstore.Guard{lost, fails} {
			for name, act := range map[string]func() (bool, error){
				"MoveDue": func() (bool, error) {
					batch, err := f.MoveDue(t.Context(), guard, limits, due)
					return batch.Moved > 0, err
				},
				"PurgeHistory": func() (bool, error) {
					n, err := f.PurgeHistory(t.Context(), guard, expired.Retention)
					return n > 0, err
				},
				"Expired": func() (bool, error) {
					batch, err := f.Expired(t.Context(), guard, outboxstore.Expired{}, expired)
					return len(batch.Rows) > 0, err
				},
				"DeleteExpired":     func() (bool, error) { return f.DeleteExpired(t.Context(), guard, batch) },
				"AdvanceIDs":        func() (bool, error) { return f.AdvanceIDs(t.Context(), guard) },
				"TruncatePartition": func() (bool, error) { return f.TruncatePartition(t.Context(), guard, limits, 2) },
				"AddHistoryDay":     func() (bool, error) { return f.AddHistoryDay(t.Context(), guard, "20010101") },
				"RetireHistoryDay": func() (bool, error) {
					return f.RetireHistoryDay(t.Context(), guard, oldDay, outboxstore.Retiring{})
				},
			} {
				did, err := act()
				if did || err != nil && !errors.Is(err, failure) {
					t.Errorf("%s: did %v, %v", name, did, err)
				}
			}
		}
		if n := f.count(t, "scheduled"); n != 1 {
			t.Errorf("%d messages are scheduled", n)
		}
		if n := f.count(t, "outbox_history"); n != 1 {
			t.Errorf("%d rows are in the history", n)
		}
		if last, err := f.LastID(t.Context()); last != before || err != nil {
			t.Errorf("the last id is %d, was %d, %v", last, before, err)
		}
	})
}
