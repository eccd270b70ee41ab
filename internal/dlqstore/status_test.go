package dlqstore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

func TestStore_CountOpenCountsUpToALimit(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if counts, err := f.CountOpen(t.Context(), 10); err != nil || len(counts) != 0 {
			t.Errorf("empty: %+v, %v", counts, err)
		}
		for range 4 {
			f.add(t, dlqstore.Letter{Topic: "orders", MessageID: "m", Reason: "failed", Error: "it failed"})
		}
		page, err := f.List(t.Context(), dlqstore.Filter{Limit: 10})
		must(t, err)
		_, err = f.Replay(t.Context(), []int64{page[0].ID}, "me", "")
		must(t, err)
		_, err = f.Discard(t.Context(), []int64{page[1].ID}, "me", "a test")
		must(t, err)
		died := `clock_timestamp() - interval '1 hour'`
		if f.where.Dialect == oncemill.SQLite {
			died = `died_at - 3600000000`
		}
		f.exec(t, `update {{dead_letters}} set died_at = `+died+` where id = $1`, page[2].ID)
		// The discarded one is not open.
		for most, dead := range map[int]int64{10: 2, 1: 1} {
			counts, err := f.CountOpen(t.Context(), most)
			if must(t, err); len(counts) != 2 {
				t.Fatalf("%+v", counts)
			}
			i := slices.IndexFunc(counts, func(c dlqstore.OpenCount) bool { return c.State == "dead" })
			j := slices.IndexFunc(counts, func(c dlqstore.OpenCount) bool { return c.State == "replaying" })
			if i < 0 || j < 0 {
				t.Fatalf("%+v", counts)
			}
			if c := counts[i]; c.N != dead || c.Source != "consumer" || c.Consumer != "stock" || c.Oldest < time.Hour || c.Oldest > 2*time.Hour {
				t.Errorf("dead: %+v", c)
			}
			if c := counts[j]; c.N != 1 || c.Oldest < 0 || c.Oldest > time.Hour/2 {
				t.Errorf("replaying: %+v", c)
			}
		}
	})
}
