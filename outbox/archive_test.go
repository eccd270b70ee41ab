package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// fillExpired puts n rows into the history that are past their time.
func (p *place) fillExpired(t *testing.T, n int) {
	t.Helper()
	if p.isSQLite() {
		p.exec(t, `with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
			insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
			select i, 1, 'orders', 'old ' || i, '', x'', x'', 0, i from n`, n)
		return
	}
	p.addDay(t, -5)
	p.exec(t, `delete from {{outbox_history}}`)
	p.exec(t, `insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
		select i, 1, 'orders', 'old ' || i, '', '', '', $2, $2 from generate_series(1, $1::int) i`, n, p.day(t, -5).Add(12*time.Hour))
}

func (p *place) historyRows(t *testing.T) int {
	t.Helper()
	return p.count(t, `select count(*) from {{outbox_history}}`)
}

func TestArchive_IsGivenEverythingBeforeItIsRemoved(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		var given []string
		left := []int{}
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(_ context.Context, rows []outbox.HistoryRow) error {
				for _, r := range rows {
					given = append(given, r.MessageID)
				}
				left = append(left, p.historyRows(t))
				return nil
			}
		})
		p.fillExpired(t, 1200)
		p.publish(t, newMessage("kept", ""))
		p.remove(t, refs(p.read(t))...)
		// The upkeep removes nothing by itself.
		if done := p.maintain(t); done != (outbox.Maintained{}) || p.historyRows(t) != 1201 {
			t.Errorf("the upkeep did %+v, %d rows are left", done, p.historyRows(t))
		}
		n, err := p.queue.Archive(t.Context(), always)
		if err != nil || n != 1200 {
			t.Errorf("archived %d, %v", n, err)
		}
		if !slices.Equal(left, []int{1201, 701, 201}) {
			t.Errorf("rows in the history at each call: %v", left)
		}
		slices.Sort(given)
		if len(slices.Compact(given)) != 1200 {
			t.Errorf("%d different rows were given", len(slices.Compact(given)))
		}
		if got := p.remembered(t); got != "kept" {
			t.Errorf("remembered: %s", got)
		}
		if n, err := p.queue.Archive(t.Context(), always); err != nil || n != 0 {
			t.Errorf("once more: %d, %v", n, err)
		}
		if done := p.maintain(t); !p.isSQLite() && done.Retired != 1 {
			t.Errorf("the upkeep did %+v with the emptied day", done)
		}
	})
}

func TestArchive_AnErrorKeepsTheRowsAndTheyComeAgain(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		refuse := errors.New("refuse")
		calls, failing := map[string]int{}, true
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(_ context.Context, rows []outbox.HistoryRow) error {
				for _, r := range rows {
					calls[r.MessageID]++
				}
				if failing && len(calls) > 500 {
					return refuse
				}
				return nil
			}
		})
		p.fillExpired(t, 700)
		n, err := p.queue.Archive(t.Context(), always)
		if !errors.Is(err, refuse) || n != 500 || p.historyRows(t) != 200 {
			t.Errorf("archived %d, %v; %d rows are left", n, err, p.historyRows(t))
		}
		for range 2 {
			if done := p.maintain(t); done.Retired != 0 || p.historyRows(t) != 200 {
				t.Errorf("the upkeep did %+v, %d rows are left", done, p.historyRows(t))
			}
		}
		failing = false
		if n, err := p.queue.Archive(t.Context(), always); err != nil || n != 200 {
			t.Errorf("archived %d, %v", n, err)
		}
		twice := 0
		for _, n := range calls {
			if n == 2 {
				twice++
			}
		}
		if len(calls) != 700 || twice != 200 {
			t.Errorf("%d rows were given, %d of them twice", len(calls), twice)
		}
	})
}

// Without the lease, nothing is given or removed, even if it is lost meanwhile.
func TestArchive_RemovesNothingWithoutTheLease(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		leases, calls := 0, 0
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(context.Context, []outbox.HistoryRow) error { calls++; return nil }
		})
		p.fillExpired(t, 10)
		guard := func(context.Context, *sql.Tx) (bool, error) { leases--; return leases >= 0, nil }
		for want := range 2 {
			leases = want
			if n, err := p.queue.Archive(t.Context(), guard); err != nil || n != 0 || calls != want || p.historyRows(t) != 10 {
				t.Errorf("with %d leases: archived %d, %v, %d calls, %d rows", want, n, err, calls, p.historyRows(t))
			}
		}
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Archive = nil })
		if n, err := p.queue.Archive(t.Context(), always); err != nil || n != 0 || p.historyRows(t) != 10 {
			t.Errorf("without a function: %d, %v", n, err)
		}
	})
}

func TestArchive_TakesLargeMessagesInPieces(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		var batches []int
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(_ context.Context, rows []outbox.HistoryRow) error {
				batches = append(batches, len(rows))
				return nil
			}
		})
		p.fillExpired(t, 20)
		p.exec(t, `update {{outbox_history}} set payload = $1`, make([]byte, 1<<20))
		if n, err := p.queue.Archive(t.Context(), always); err != nil || n != 20 || fmt.Sprint(batches) != "[8 8 4]" {
			t.Errorf("archived %d, %v, in batches %v", n, err, batches)
		}
	})
}

// What was kept before the history was turned off goes too.
func TestHistory_NoneRetiresWhatWasKeptBefore(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		p.age(t)
		p.publish(t, newMessage("today", ""))
		p.remove(t, refs(p.read(t))...)
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = outbox.NoHistory })
		if p.isSQLite() {
			eventually(t, "the history is empty", func() bool { p.maintain(t); return p.historyRows(t) == 0 })
			return
		}
		p.addDay(t, -1)
		if done := p.maintain(t); done.Retired != 2 || done.Made != 0 {
			t.Errorf("the upkeep did %+v", done)
		}
		if got := p.remembered(t); got != "today" { // until the day is over
			t.Errorf("remembered: %s", got)
		}
		if done := p.maintain(t); done != (outbox.Maintained{}) {
			t.Errorf("the second round did %+v", done)
		}
	})
}
