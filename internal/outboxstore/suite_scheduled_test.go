package outboxstore_test

import (
	"database/sql"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// due chooses all that is due.
var due = outboxstore.Choice{
	Passed: outboxstore.Passed{UpTo: outboxstore.Beginning}, End: outboxstore.End,
	Look: 1000, Rows: 1000, Bytes: math.MaxInt64, Most: outboxstore.MostBytes,
}

func (f *fixture) schedule(t *testing.T, at time.Time, ids ...string) {
	t.Helper()
	rows := make([]outboxstore.ScheduledRow, len(ids))
	for i, id := range ids {
		rows[i] = outboxstore.ScheduledRow{Row: message(id, ""), Micros: at.UnixMicro()}
	}
	f.inTx(t, func(tx *sql.Tx) error { return f.Schedule(t.Context(), tx, rows) })
}

func TestStore_MoveDueMovesInOrder(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		over := outboxstore.Passed{UpTo: outboxstore.Beginning}
		if _, found, err := f.NextDue(t.Context(), over); found || err != nil {
			t.Errorf("found %v, %v", found, err)
		}
		now := time.Now()
		f.schedule(t, now.Add(100*time.Hour), "later")
		if next, found, err := f.NextDue(t.Context(), over); !found || err != nil || next.In < time.Hour {
			t.Errorf("next: %+v, %v, %v", next, found, err)
		}
		ids := numbered("second", 250)
		f.schedule(t, now.Add(-time.Hour), ids...)
		f.schedule(t, now.Add(-2*time.Hour), "first")
		f.inTx(t, func(tx *sql.Tx) error {
			row := outboxstore.ScheduledRow{Row: message("relative", ""), Micros: (100 * time.Hour).Microseconds(), Relative: true}
			return f.Schedule(t.Context(), tx, []outboxstore.ScheduledRow{row})
		})
		if next, found, err := f.NextDue(t.Context(), over); !found || err != nil || next.In > 0 {
			t.Errorf("next: %+v, %v, %v", next, found, err)
		}
		moved := 0
		for { // SQLite's turn to write ends earlier on a busy machine
			batch, err := f.MoveDue(t.Context(), holds, limits, due)
			if must(t, err); batch.Moved == 0 {
				break
			}
			moved += batch.Moved
		}
		if moved != 251 {
			t.Errorf("moved %d", moved)
		}
		expectIDs(t, "moved", f.read(t), append([]string{"first"}, ids...)...)
		if n := f.count(t, "scheduled"); n != 2 {
			t.Errorf("%d are left", n)
		}
	})
}

func TestStore_CancelPreventsTheMove(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.schedule(t, time.Now().Add(-time.Hour), "a", "b", "b")
		f.inTx(t, func(tx *sql.Tx) error {
			n, err := f.Cancel(t.Context(), tx, "b")
			if n != 2 {
				t.Errorf("canceled %d", n)
			}
			return err
		})
		_, err := f.MoveDue(t.Context(), holds, limits, due)
		must(t, err)
		expectIDs(t, "moved", f.read(t), "a")
	})
}

// A choice passes over messages, and a message that a trigger refuses keeps no other from
// moving.
func TestStore_MoveDueKeepsToItsChoice(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.schedule(t, time.Now().Add(-time.Hour), "1", "2", "3")
		if f.isSQLite() {
			f.exec(t, `create trigger refuse before insert on {{outbox}} for each row when new.message_id = '2' begin select raise(abort, 'refused'); end`)
		} else {
			f.exec(t, `create function {{refuse}}() returns trigger language plpgsql as $$ begin raise 'refused'; end $$`)
			f.exec(t, `create trigger refuse before insert on {{outbox}} for each row when (new.message_id = '2') execute function {{refuse}}()`)
		}
		_, err := f.MoveDue(t.Context(), holds, limits, due)
		if cause := (*outboxstore.RowError)(nil); !errors.As(err, &cause) || cause.TookLong {
			t.Errorf("got %v", err)
		}
		choice := due
		choice.Seqs = []int64{1}
		choice.Singly = time.Minute
		batch, err := f.MoveDue(t.Context(), holds, limits, choice)
		if must(t, err); batch.Moved != 1 || len(batch.Refused) != 1 || batch.Refused[0].Seq != 2 {
			t.Errorf("got %+v", batch)
		}
		expectIDs(t, "moved", f.read(t), "3")
		choice = due
		choice.Only = 1
		_, err = f.MoveDue(t.Context(), holds, limits, choice)
		must(t, err)
		expectIDs(t, "the only one", f.read(t), "3", "1")
		if f.isSQLite() {
			return // size does not matter
		}
		size, err := f.NextLarge(t.Context(), outboxstore.Passed{UpTo: outboxstore.Beginning}, 3)
		if must(t, err); size != int64(len("payload of 2{}")) {
			t.Errorf("the next large one has %d bytes", size)
		}
	})
}
