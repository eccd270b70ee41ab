package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// tryRemove removes rows beside locks. A removal that waits for them fails the test.
func (p *fixture) tryRemove(t *testing.T, refs ...outboxstore.Ref) (outboxstore.Removal, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	removal, err := p.queue.Remove(ctx, refs)
	if ctx.Err() != nil {
		t.Fatalf("the removal waits for a lock: %v", err)
	}
	return removal, err
}

// lock executes text in a transaction that stays open until release is called.
func (p *fixture) lock(t *testing.T, text string, args ...any) (release func()) {
	t.Helper()
	tx, err := p.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.ExecContext(t.Context(), p.expand(t, text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return func() { expectNoError(t, tx.Commit()) }
}

func TestRemove_SkipsRowsThatOthersHaveLocked(t *testing.T) {
	sizes := map[string]int{"a few rows": 5, "many rows": 300}
	locks := map[string]string{
		"for update":    `select from {{outbox}} where message_id in ('m-1', 'm-3') for update`,
		"for key share": `select from {{outbox}} where message_id in ('m-1', 'm-3') for key share`,
		"updated":       `update {{outbox}} set topic = 'other' where message_id in ('m-1', 'm-3')`,
	}
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for _, history := range []time.Duration{time.Hour, outbox.NoHistory} {
			for size, n := range sizes {
				for lock, text := range locks {
					name := fmt.Sprintf("history %v, %s, %s", history, size, lock)
					p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = history })
					before := p.historyRows(t)
					p.publish(t, messages("m", n)...)
					rows := p.read(t)
					want := slices.DeleteFunc(refs(rows), func(r outboxstore.Ref) bool { return r.MessageID != "m-1" && r.MessageID != "m-3" })
					release := p.lock(t, text)
					removal, err := p.tryRemove(t, refs(rows)...)
					if err != nil || removal.Missed != 0 {
						t.Errorf("%s: %+v, %v", name, removal, err)
					}
					byID := func(a, b outboxstore.Ref) int { return int(a.ID - b.ID) }
					slices.SortFunc(want, byID)
					slices.SortFunc(removal.Locked, byID)
					if !slices.Equal(removal.Locked, want) {
						t.Errorf("%s: %v are locked, want %v", name, removal.Locked, want)
					}
					if left := p.read(t); len(left) != 2 {
						t.Errorf("%s: %d rows are left", name, len(left))
					}
					release()
					p.remove(t, removal.Locked...)
					expectIDs(t, p.read(t))
					kept := map[time.Duration]int{time.Hour: n, outbox.NoHistory: 0}[history]
					if got := p.historyRows(t) - before; got != kept {
						t.Errorf("%s: %d rows in the history, want %d", name, got, kept)
					}
				}
			}
		}
	})
}

// A row that somebody else is removing is locked, and then gone.
func TestRemove_ARowThatIsDeletedMeanwhileIsNotLockedForEver(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.publish(t, messages("m", 3)...)
		rows := refs(p.read(t))
		release := p.lock(t, `delete from {{outbox}} where id = $1`, rows[1].ID)
		removal, err := p.tryRemove(t, rows...)
		if err != nil || !slices.Equal(removal.Locked, rows[1:2]) {
			t.Errorf("%+v, %v", removal, err)
		}
		release()
		removal, err = p.tryRemove(t, removal.Locked...)
		if err != nil || len(removal.Locked) != 0 {
			t.Errorf("%+v, %v", removal, err)
		}
		if n := p.historyRows(t); n != 2 {
			t.Errorf("%d rows in the history, want 2", n)
		}
	})
}

// Whoever builds an index on the outbox keeps rows from being removed; they are
// owed, and their history is not given up.
func TestRemove_ALockedTableIsAnErrorAndLosesNothing(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for _, n := range []int{5, 300} {
			p.publish(t, messages("m", n)...)
			rows := refs(p.read(t))
			before := p.historyRows(t)
			release := p.lock(t, `lock table {{outbox}} in share mode`)
			if removal, err := p.tryRemove(t, rows...); err == nil || removal.Missed != 0 {
				t.Errorf("%+v, %v", removal, err)
			}
			if left := p.read(t); len(left) != n || p.historyRows(t) != before {
				t.Errorf("%d rows are left, %d are in the history", len(left), p.historyRows(t))
			}
			release()
			p.remove(t, rows...)
			if got := p.historyRows(t) - before; got != n {
				t.Errorf("%d rows in the history, want %d", got, n)
			}
		}
	})
}

// An index build locks the history for as long as it takes. Delivery goes on, and does
// not wait for the lock with each batch.
func TestHistory_ALockOnItDoesNotStopDelivery(t *testing.T) {
	locks := map[string]string{
		"index":        `create index on {{outbox_history}} (message_id)`,
		"whole table":  `lock table {{outbox_history}} in access exclusive mode`,
		"today's part": "",
	}
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for name, text := range locks {
			if text == "" {
				text = `lock table ` + dayTable(p.day(t, 0)) + `, ` + dayTable(p.day(t, 1)) + ` in share mode`
			}
			var log syncBuffer
			p.use(t, p.db, func(cfg *outbox.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			release := p.lock(t, text)
			for round, n := range []int{5, 300, 5} {
				p.publish(t, messages("m", n)...)
				rows := p.read(t)
				p.tap.sent()
				removal, err := p.tryRemove(t, refs(rows)...)
				if err != nil || removal.Missed != n || len(removal.Locked) != 0 {
					t.Errorf("%s: %+v, %v", name, removal, err)
				}
				moves := 0
				for _, s := range p.tap.sent() {
					if strings.Contains(s.text, "outbox_history\"") {
						moves++
					}
				}
				if round == 0 && moves == 0 || round > 0 && moves > 0 {
					t.Errorf("%s: batch %d tried the history %d times", name, round, moves)
				}
				expectIDs(t, p.read(t))
			}
			if text := log.String(); strings.Count(text, "level=ERROR") != 1 || !strings.Contains(text, "rows=5") {
				t.Errorf("%s: logged %q", name, text)
			}
			release()
			p.use(t, p.db, nil) // or after some seconds
			p.publish(t, newMessage("kept", ""))
			p.remove(t, refs(p.read(t))...)
			if got := p.remembered(t); got != "kept" {
				t.Errorf("%s: remembered: %s", name, got)
			}
			p.exec(t, `delete from {{outbox_history}}`)
		}
	})
}

// A row that is locked is no reason to give up the history of others, and a history
// that is locked is none to wait for rows.
func TestRemove_SkipsLockedRowsBesideALockedHistory(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.cfg.Logger = slog.New(slog.DiscardHandler)
		p.use(t, p.db, nil)
		p.publish(t, messages("m", 100)...)
		rows := refs(p.read(t))
		release := p.lock(t, `select from {{outbox}} where id = $1 for update`, rows[7].ID)
		done := p.lock(t, `create index on {{outbox_history}} (topic)`)
		removal, err := p.tryRemove(t, rows...)
		if err != nil || removal.Missed != 99 || !slices.Equal(removal.Locked, rows[7:8]) {
			t.Errorf("%d missed, %v locked, %v", removal.Missed, removal.Locked, err)
		}
		release()
		done()
	})
}
