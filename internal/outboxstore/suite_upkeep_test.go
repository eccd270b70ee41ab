package outboxstore_test

import (
	"database/sql"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
)

const oldDay = "20240229"

var expired = outboxstore.ExpiredLimits{Retention: 24 * time.Hour, Rows: 100, Bytes: 1 << 20}

// age makes the history one of long ago.
func (f *fixture) age(t *testing.T) {
	t.Helper()
	noon := time.Date(2024, 2, 29, 12, 0, 0, 0, time.UTC)
	if f.isSQLite() {
		f.exec(t, `update {{outbox_history}} set relayed_at = $1`, noon.UnixMicro())
		return
	}
	_, err := f.AddHistoryDay(t.Context(), holds, oldDay)
	must(t, err)
	f.exec(t, `update {{outbox_history}} set relayed_at = $1`, noon)
}

func TestStore_HistoryIsListedCountedAndSentAgain(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		rows := f.insert(t, "a", "b", "c")
		f.remove(t, refs(rows), true)
		list := func(filter outboxstore.HistoryFilter) (ids []string) {
			t.Helper()
			filter.Limit = 2
			rows, err := f.ListHistory(t.Context(), filter)
			must(t, err)
			for _, r := range rows {
				ids = append(ids, r.MessageID)
				filter.After = outboxstore.HistoryPosition{ID: r.ID, RelayedAt: r.RelayedAt}
			}
			if len(rows) == 2 {
				rows, err := f.ListHistory(t.Context(), filter)
				must(t, err)
				for _, r := range rows {
					ids = append(ids, r.MessageID)
				}
			}
			return ids
		}
		now, err := f.Now(t.Context())
		must(t, err)
		for name, c := range map[string]struct {
			filter outboxstore.HistoryFilter
			want   []string
		}{
			"now":      {outboxstore.HistoryFilter{To: now.Add(time.Millisecond)}, []string{"a", "b", "c"}},
			"from now": {outboxstore.HistoryFilter{From: now.Add(time.Millisecond)}, nil},
			"all":      {outboxstore.HistoryFilter{}, []string{"a", "b", "c"}},
			"ids":      {outboxstore.HistoryFilter{IDs: []int64{rows[0].ID, rows[2].ID}}, []string{"a", "c"}},
			"messages": {outboxstore.HistoryFilter{MessageIDs: []string{"b", "x"}}, []string{"b"}},
			"key":      {outboxstore.HistoryFilter{Key: "key of c"}, []string{"c"}},
			"topic":    {outboxstore.HistoryFilter{Topic: "another"}, nil},
			"from":     {outboxstore.HistoryFilter{From: time.Now().Add(time.Hour)}, nil},
			"to":       {outboxstore.HistoryFilter{To: time.Now().Add(time.Hour)}, []string{"a", "b", "c"}},
		} {
			if got := list(c.filter); !slices.Equal(got, c.want) {
				t.Errorf("%s: listed %v", name, got)
			}
			if n, err := f.CountHistory(t.Context(), c.filter); n != len(c.want) || err != nil {
				t.Errorf("%s: counted %d, %v", name, n, err)
			}
		}
		f.inTx(t, func(tx *sql.Tx) error {
			_, err := f.Resend(t.Context(), tx, outboxstore.HistoryFilter{Limit: 2})
			return err
		})
		again := f.read(t)
		expectIDs(t, "sent again", again, "a", "b")
		if again[0].ID <= rows[2].ID || !again[0].CreatedAt.Equal(rows[0].CreatedAt) {
			t.Errorf("sent again as %+v, was %+v", again[0].Ref, rows[0].Ref)
		}
	})
}

func TestStore_ForgetRemovesNoOtherRow(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.remove(t, refs(f.insert(t, numbered("m", 3)...)), true)
		f.age(t)
		two := expired
		two.Rows = 2
		batch, err := f.Expired(t.Context(), holds, outboxstore.Expired{}, two)
		if must(t, err); len(batch.Rows) != 2 {
			t.Fatalf("expired: %+v", batch)
		}
		// A row that took the id, and on SQLite the rowid, of an archived one.
		f.exec(t, `update {{outbox_history}} set message_id = 'another' where message_id = 'm0'`)
		if held, err := f.DeleteExpired(t.Context(), holds, batch); !held || err != nil {
			t.Errorf("held %v, %v", held, err)
		}
		left, err := f.ListHistory(t.Context(), outboxstore.HistoryFilter{Limit: 10})
		if must(t, err); len(left) != 2 || left[0].MessageID != "another" || left[1].MessageID != "m2" {
			t.Errorf("left: %+v", left)
		}
		kept := expired
		kept.Retention = 100 * 365 * 24 * time.Hour
		if batch, err := f.Expired(t.Context(), holds, outboxstore.Expired{}, kept); len(batch.Rows) > 0 || err != nil {
			t.Errorf("expired within its retention: %+v, %v", batch, err)
		}
	})
}

func TestStore_PurgeKeepsWhatIsRetained(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.remove(t, refs(f.insert(t, numbered("m", 250)...)), true)
		purge := func() int64 {
			t.Helper()
			n, err := f.PurgeHistory(t.Context(), holds, time.Hour)
			must(t, err)
			return n
		}
		if n := purge(); n != 0 {
			t.Errorf("purged %d", n)
		}
		f.age(t)
		if n, want := purge(), map[bool]int64{true: 250}[f.isSQLite()]; n != want {
			t.Errorf("purged %d, want %d", n, want)
		}
	})
}

// patiently repeats what waits for a lock only briefly: the server's own upkeep may hold it.
func patiently(do func() (bool, error)) (did bool, err error) {
	for end := time.Now().Add(testserver.MaxWait); ; {
		if did, err = do(); !sqlerr.LockTimedOut(err) || time.Now().After(end) {
			return did, err
		}
	}
}

func TestStore_DaysOfTheHistoryAreAddedAndRetired(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		missing, days, err := f.HistoryDays(t.Context(), 3)
		must(t, err)
		if f.isSQLite() {
			if len(missing)+len(days) > 0 {
				t.Errorf("%v are missing of %v", missing, days)
			}
			return
		}
		if len(missing) != 2 || len(days) < 2 || days[0].Filled || days[0].Past > 0 {
			t.Errorf("%v are missing of %v", missing, days)
		}
		if added, err := f.AddHistoryDay(t.Context(), holds, days[0].Name); added || err != nil {
			t.Errorf("added twice: %v, %v", added, err)
		}
		f.remove(t, refs(f.insert(t, "a")), true)
		f.age(t)
		_, days, err = f.HistoryDays(t.Context(), 3)
		if must(t, err); days[0].Name != oldDay || !days[0].Filled || days[0].Past < 24*time.Hour {
			t.Errorf("days: %+v", days)
		}
		retire := func(how outboxstore.Retiring, want bool) {
			t.Helper()
			did, err := patiently(func() (bool, error) { return f.RetireHistoryDay(t.Context(), holds, oldDay, how) })
			if did != want || err != nil {
				t.Errorf("%+v: %v, %v", how, did, err)
			}
		}
		retire(outboxstore.Retiring{Empty: true}, false)
		retire(outboxstore.Retiring{Empty: true, Drop: true}, false)
		retire(outboxstore.Retiring{}, true)
		retire(outboxstore.Retiring{Empty: true, Drop: true}, true)
		retire(outboxstore.Retiring{Drop: true}, false)
	})
}

func TestStore_TruncateLeavesAPartitionWithRows(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		ring, err := f.Ring(t.Context())
		must(t, err)
		if f.isSQLite() {
			if len(ring.Partitions) > 0 {
				t.Errorf("ring: %+v", ring)
			}
			return
		}
		if len(ring.Partitions) != outboxstore.Partitions {
			t.Fatalf("ring: %+v", ring)
		}
		rows := refs(f.insert(t, "a"))
		writing := outboxstore.PartitionOf(rows[0].ID)
		truncate := func() bool {
			t.Helper()
			did, err := patiently(func() (bool, error) { return f.TruncatePartition(t.Context(), holds, limits, writing) })
			must(t, err)
			return did
		}
		if truncate() {
			t.Error("truncated a partition with a row")
		}
		f.remove(t, rows, false)
		if !truncate() {
			t.Error("did not truncate an empty partition")
		}
		// What an open transaction has written cannot be seen.
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		must(t, f.Insert(t.Context(), tx, []outboxstore.Row{message("open", "")}))
		if did, err := f.TruncatePartition(t.Context(), holds, limits, writing); did || !sqlerr.TimedOut(err) {
			t.Errorf("beside an open writer: %v, %v", did, err)
		}
		lockers, err := f.PartitionLockers(t.Context(), writing)
		if must(t, err); len(lockers) != 1 {
			t.Errorf("lockers: %v", lockers)
		}
		holders, err := f.RingLockers(t.Context())
		if must(t, err); len(holders) == 0 {
			t.Error("nobody holds a lock")
		}
		must(t, tx.Commit())
		expectIDs(t, "written meanwhile", f.read(t), "open")
		if did, err := f.AdvanceIDs(t.Context(), holds); !did || err != nil {
			t.Errorf("advanced %v, %v", did, err)
		}
		if id := f.insert(t, "next")[1].ID; outboxstore.PartitionOf(id) != (writing+1)%outboxstore.Partitions {
			t.Errorf("the next id is %d", id)
		}
	})
}

func TestStore_SequenceIsRepaired(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		rows := f.insert(t, "a", "b")
		last := rows[1].ID
		if q, err := f.Sequence(t.Context()); err != nil || q.Last != last || q.Highest != last || q.Cache > 1 || q.ScheduledBehind || q.Standby || q.ReadOnly {
			t.Errorf("sequence: %+v, %v", q, err)
		}
		insert := `insert into {{outbox}} (lane, id, topic, message_id, payload) values (3, $1, 'orders', $2, '')`
		f.exec(t, insert, last+1000, "restored")
		f.exec(t, insert, last+1<<60, "forged")
		if f.isSQLite() {
			f.exec(t, `update sqlite_sequence set seq = $1 where name = 'oncemill_outbox'`, last)
		}
		if q, err := f.Sequence(t.Context()); err != nil || q.Last != last || q.Highest != last+1000 {
			t.Errorf("sequence: %+v, %v", q, err)
		}
		forged, err := f.Forged(t.Context())
		if must(t, err); len(forged) != 1 || forged[0].MessageID != "forged" {
			t.Errorf("forged: %+v", forged)
		}
		for floor, want := range map[int64]int64{0: last + 1000, last + 5000: last + 5000} {
			f.repaired(t, floor, max(want, f.last(t)))
		}
	})
}

func (f *fixture) last(t *testing.T) int64 {
	t.Helper()
	last, err := f.LastID(t.Context())
	must(t, err)
	return last
}

func (f *fixture) repaired(t *testing.T, floor, want int64) {
	t.Helper()
	if last, err := f.RepairSequence(t.Context(), floor); last != want || err != nil {
		t.Errorf("repaired to %d, %v; want %d", last, err, want)
	}
	if last := f.last(t); last != want {
		t.Errorf("the last id is %d, want %d", last, want)
	}
}
