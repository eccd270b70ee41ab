package inboxstore_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/inboxstore"
)

func TestPurge_RemovesIDsPastRetention(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		never := func(inboxstore.Record) time.Duration { return 0 }
		for _, id := range []string{"a", "b", "failing"} {
			_, err := f.RecordFailure(t.Context(), id, inboxstore.Failure{Again: never})
			must(t, err)
		}
		f.handle(t, "a", "b", "c")
		f.die(t, "dead")
		if ids, failures, err := f.Purge(t.Context(), time.Hour, 10); err != nil || ids != 0 || failures != 2 {
			t.Errorf("of what is young: %d ids, %d failures, %v", ids, failures, err)
		}
		for _, want := range [][2]int64{{2, 1}, {1, 0}, {0, 0}} {
			if ids, failures, err := f.Purge(t.Context(), -time.Hour, 2); err != nil || [2]int64{ids, failures} != want {
				t.Errorf("%d ids, %d failures, %v; want %v", ids, failures, err, want)
			}
		}
		if got := f.handle(t, "dead", "a"); got[0] || !got[1] {
			t.Errorf("claimed %v", got)
		}
	})
}

// Two consumers know the same messages, one of them for longer than they are kept.
func TestPurge_LeavesWhatIsOfOtherConsumers(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		cfg := inboxstore.Config{Consumer: "mail", Timeout: time.Minute}
		cfg = cfg.Resolve(f.where.Dialect, func(field, value, problem string) { t.Errorf("%s = %s: %s", field, value, problem) })
		mail := *f
		mail.Store = inboxstore.Open(f.db, f.where, cfg)
		for _, of := range []*fixture{f, &mail} {
			of.handle(t, "a", "b")
			_, err := of.RecordFailure(t.Context(), "failing", inboxstore.Failure{Again: func(inboxstore.Record) time.Duration { return 0 }})
			must(t, err)
		}
		hours := map[oncemill.Dialect]string{oncemill.SQLite: "7200000000", oncemill.PostgreSQL: "interval '2 hours'"}[f.where.Dialect]
		f.exec(t, `update {{inbox}} set received_at = received_at - `+hours+` where consumer = 'mail'`)
		f.exec(t, `update {{inbox_failures}} set changed_at = changed_at - `+hours+` where consumer = 'mail'`)
		if ids, failures, err := f.Purge(t.Context(), time.Hour, 10); err != nil || ids != 0 || failures != 0 {
			t.Errorf("of what is young, or another's: %d ids, %d failures, %v", ids, failures, err)
		}
		if ids, failures, err := mail.Purge(t.Context(), time.Hour, 10); err != nil || ids != 2 || failures != 1 {
			t.Errorf("of what is old: %d ids, %d failures, %v", ids, failures, err)
		}
		if got := f.handle(t, "a", "b"); got[0] || got[1] {
			t.Errorf("claimed again %v", got)
		}
	})
}

// However many messages fail that are never handled, a purge looks at a few of them at a
// time, and gets to all.
func TestPurge_LooksAtAFewFailuresAtATime(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		never := func(inboxstore.Record) time.Duration { return 0 }
		fail := func(id string) {
			_, err := f.RecordFailure(t.Context(), id, inboxstore.Failure{Again: never})
			must(t, err)
		}
		for i := range 20 {
			fail(fmt.Sprint("never ", i))
		}
		for _, id := range []string{"z", "a"} { // behind them, and then before them
			fail(id)
			f.handle(t, id)
			removed := []int64{}
			for range 6 {
				_, failures, err := f.Purge(t.Context(), time.Hour, 5)
				must(t, err)
				removed = append(removed, failures)
			}
			if slices.Index(removed, 1) < 1 || slices.Max(removed) > 1 {
				t.Errorf("%s: removed %v", id, removed)
			}
		}
	})
}

// A statement lists a thousand.
func TestConsumers_ReturnsAll(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if f.where.Dialect == oncemill.PostgreSQL {
			f.exec(t, `alter table {{inbox}} disable trigger user`) // the seal
		}
		const numbers = `with recursive n (i) as (select 1 union all select i + 1 from n where i < 2000)`
		f.exec(t, `insert into {{inbox}} (consumer, message_id) `+numbers+` select 'a' || (i + 1000), 'm' from n`)
		f.exec(t, `insert into {{inbox_failures}} (consumer, message_id) `+numbers+` select 'a' || (i + 2500), 'm' from n`)
		all, err := f.Consumers(t.Context())
		if err != nil || len(all) != 3500 || all[0] != "a1001" || all[3499] != "a4500" || !slices.IsSorted(all) {
			t.Errorf("got %d consumers, %v", len(all), err)
		}
	})
}
