package outboxstore_test

import (
	"database/sql"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestStore_BacklogCountsUpToALimit(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		b, err := f.Backlog(t.Context(), 10)
		if must(t, err); len(b.Lanes) != 0 || b.Scheduled != 0 || b.Due != 0 || b.Late != 0 {
			t.Errorf("empty: %+v", b)
		}
		f.insert(t, numbered("m", 7)...)
		f.inTx(t, func(tx *sql.Tx) error {
			other := message("other", "")
			other.Lane = 5
			return f.Insert(t.Context(), tx, []outboxstore.Row{other})
		})
		hourAgo := `clock_timestamp() - interval '1 hour'`
		if f.isSQLite() {
			hourAgo = `created_at - 3600000000`
		}
		f.exec(t, `update {{outbox}} set created_at = `+hourAgo+` where message_id = 'm1'`)
		now := time.Now()
		f.schedule(t, now.Add(time.Hour), "later")
		f.schedule(t, now.Add(-time.Hour), "due", "due too")

		b, err = f.Backlog(t.Context(), 10)
		must(t, err)
		if len(b.Lanes) != 2 || b.Lanes[0].Lane != 3 || b.Lanes[0].Rows != 7 || b.Lanes[1].Lane != 5 || b.Lanes[1].Rows != 1 {
			t.Errorf("lanes %+v", b.Lanes)
		}
		if first, second := b.Lanes[0].Oldest, b.Lanes[1].Oldest; first < time.Hour || first > 2*time.Hour || second < 0 || second > time.Hour/2 {
			t.Errorf("ages %s, %s", first, second)
		}
		if b.Scheduled != 3 || b.Due != 2 || b.Late < 59*time.Minute || b.Late > 2*time.Hour {
			t.Errorf("scheduled %+v", b)
		}
		b, err = f.Backlog(t.Context(), 1)
		if must(t, err); b.Lanes[0].Rows != 1 || b.Scheduled != 1 || b.Due != 1 {
			t.Errorf("limited: %+v", b)
		}
		if !f.isSQLite() {
			// A session that reports its rows after they were analyzed makes them count twice.
			testserver.Eventually(t, "the estimate is right once all sessions have reported", func() bool {
				for _, partition := range []string{"outbox_0", "outbox_1", "outbox_2", "outbox_3"} {
					f.exec(t, `analyze {{`+partition+`}}`)
				}
				b, err = f.Backlog(t.Context(), 1)
				must(t, err)
				return b.Estimate == 8
			})
		}
		f.remove(t, refs(f.read(t)), false)
		b, err = f.Backlog(t.Context(), 10)
		if must(t, err); slices.ContainsFunc(b.Lanes, func(l outboxstore.LaneBacklog) bool { return l.Lane == 3 }) {
			t.Errorf("after the lane was emptied: %+v", b.Lanes)
		}
	})
}
