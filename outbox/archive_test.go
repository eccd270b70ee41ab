package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// fillExpired puts n rows into the history that are past their time.
func (p *fixture) fillExpired(t *testing.T, n int) {
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

func (p *fixture) historyRows(t *testing.T) int {
	t.Helper()
	return p.count(t, `select count(*) from {{outbox_history}}`)
}

func TestArchive_IsGivenEverythingBeforeItIsRemoved(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
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
		if done := p.maintain(t); done != (outboxstore.Maintained{}) || p.historyRows(t) != 1201 {
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
	onEachDatabase(t, func(t *testing.T, p *fixture) {
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

// A panic is an error: the archiver's goroutine is nobody's who would recover.
func TestArchive_APanicKeepsTheRows(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(context.Context, []outbox.HistoryRow) error { panic("no such bucket") }
		})
		p.fillExpired(t, 10)
		var panicked *oncemill.PanicError
		if n, err := p.queue.Archive(t.Context(), always); !errors.As(err, &panicked) || n != 0 || p.historyRows(t) != 10 {
			t.Errorf("archived %d, %v; %d rows are left", n, err, p.historyRows(t))
		}
	})
}

// Without the lease, nothing is given or removed, even if it is lost meanwhile.
func TestArchive_RemovesNothingWithoutTheLease(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
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
	onEachDatabase(t, func(t *testing.T, p *fixture) {
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
	onEachDatabase(t, func(t *testing.T, p *fixture) {
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
		if done := p.maintain(t); done != (outboxstore.Maintained{}) {
			t.Errorf("the second round did %+v", done)
		}
	})
}

// Ids were given out again: at the border of a batch there are two rows with one id,
// and the later one has not been archived.
func TestArchive_RemovesNoRowThatSharesAnIDWithOneThatWasArchived(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		given := map[string]int{}
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(_ context.Context, rows []outbox.HistoryRow) error {
				for _, r := range rows {
					given[r.MessageID]++
				}
				return nil
			}
		})
		const n = 500 // a batch
		p.fillExpired(t, n)
		if p.isSQLite() {
			p.exec(t, `insert into {{outbox_history}} select id, lane, topic, 'the other', key, payload, metadata, created_at, relayed_at + 1 from {{outbox_history}} where id = $1`, n)
		} else {
			p.exec(t, `insert into {{outbox_history}} select lane, id, topic, 'the other', key, payload, metadata, created_at, relayed_at + interval '1 second' from {{outbox_history}} where id = $1`, n)
		}
		for range 2 { // a row that shares its id with the last of a batch comes in the next round
			_, err := p.queue.Archive(t.Context(), always)
			expectNoError(t, err)
			if left := p.historyRows(t); left != n+1-len(given) {
				t.Errorf("%d rows were archived, %d are left", len(given), left)
			}
		}
		if given["the other"] != 1 || len(given) != n+1 {
			t.Errorf("the other row was given %d times, %d rows in all", given["the other"], len(given))
		}
	})
}

// SQLite gives the highest rowid out again. Whatever has it now was not archived.
func TestArchive_RemovesNoRowThatTookThePlaceOfOneThatWasArchived(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	var given []string
	p.use(t, p.db, func(cfg *outbox.Config) {
		cfg.Archive = func(_ context.Context, rows []outbox.HistoryRow) error {
			for _, r := range rows {
				given = append(given, r.MessageID)
			}
			if len(given) == 3 {
				p.exec(t, `delete from {{outbox_history}} where message_id = 'old 3'`)
				p.remember(t, "successor", time.UnixMicro(3))
			}
			return nil
		}
	})
	p.fillExpired(t, 3)
	if _, err := p.queue.Archive(t.Context(), always); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(given, []string{"old 1", "old 2", "old 3", "successor"}) || p.historyRows(t) != 0 {
		t.Errorf("%v were given, %d rows are left", given, p.historyRows(t))
	}
}

func TestArchive_IsCalledWithTheCallersContext(t *testing.T) {
	type mark struct{}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		var seen any
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(ctx context.Context, _ []outbox.HistoryRow) error { seen = ctx.Value(mark{}); return nil }
		})
		p.fillExpired(t, 1)
		_, err := p.queue.Archive(context.WithValue(t.Context(), mark{}, "the caller's"), always)
		if err != nil || seen != "the caller's" {
			t.Errorf("%v, %v", seen, err)
		}
	})
}

// The server falls silent at each statement of the archive's. Archive returns, and
// goes on over other connections: what has not been handed over is then.
func TestArchive_ReturnsWhenTheServerFallsSilent(t *testing.T) {
	t.Parallel()
	for step, text := range map[string]string{
		"days":    "right(c.relname, 8)",
		"read":    "over (order by f.id rows between",
		"removal": "c.relayed_micros",
		"guard":   "select 'the guard'",
	} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t, "binary_parameters=yes")
			p.fillExpired(t, 3)
			proxy, dsn := testserver.NewPostgresProxy(t, p.dsn)
			db := sql.OpenDB(&tap{driver: p.tap.driver, dsn: dsn})
			t.Cleanup(func() { proxy.Cut(); expectNoError(t, db.Close()) })
			cfg, given := p.cfg, 0
			cfg.Archive = func(_ context.Context, rows []outbox.HistoryRow) error { given += len(rows); return nil }
			box, err := outbox.New(db, cfg)
			expectNoError(t, err)
			guard := func(ctx context.Context, tx *sql.Tx) (bool, error) {
				_, err := tx.ExecContext(ctx, `select 'the guard'`)
				return true, err
			}
			proxy.Silence(func(statement string) bool { return strings.Contains(statement, text) }, 1)
			n, err := outboxqueue.Of(box).Archive(t.Context(), guard)
			if !errors.Is(err, outboxqueue.ErrNoAnswer) || !errors.Is(err, context.DeadlineExceeded) || n != 0 || proxy.Silenced() != 1 {
				t.Errorf("archived %d, %v; %d connections silenced", n, err, proxy.Silenced())
			}
			want := 3
			if step == "removal" {
				want = 6 // once more: nobody knows whether they were removed
			}
			if n, err := outboxqueue.Of(box).Archive(t.Context(), guard); err != nil || n != 3 || given != want || p.historyRows(t) != 0 {
				t.Errorf("then: archived %d, %v; %d rows were given, %d are left", n, err, given, p.historyRows(t))
			}
		})
	}
}
