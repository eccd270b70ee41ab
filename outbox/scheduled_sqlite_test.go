package outbox_test

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"
)

// Messages that a trigger of SQLite refuses, in whatever way, hold up their keys alone, and are
// moved once they can be, also if there are more than are known one by one.
func TestMoveDue_OneThatSQLiteRefusesHoldsUpItsKeyAlone(t *testing.T) {
	t.Parallel()
	for _, raise := range []string{"abort", "fail", "rollback"} {
		for _, known := range []int{100, 3} {
			if raise == "rollback" && known == 3 {
				continue // ends the transaction that moves the others, too
			}
			t.Run(fmt.Sprint(raise, known), func(t *testing.T) {
				t.Parallel()
				p := onSQLite(t)
				p.exec(t, `create trigger refuses before insert on {{outbox}} for each row when new.message_id like 'bad%' begin select raise(`+raise+`, 'not so'); end`)
				p.cfg.Logger = slog.New(slog.DiscardHandler)
				p.use(t, p.db, nil)
				p.queue.KnowRefused(known)
				past := p.now(t).Add(-time.Hour)
				const refused, others = 8, 450 // several times what a statement moves
				for i := range refused {
					due := past.Add(time.Duration(100*i) * time.Second)
					key := fmt.Sprint("k", i)
					p.publish(t, at(fmt.Sprint("bad", i), key, due), at(fmt.Sprint("behind", i), key, due.Add(time.Minute)))
				}
				for i := range others {
					p.publish(t, at(fmt.Sprint("other", i), fmt.Sprint("other", i), past.Add(time.Duration(i)*time.Second)))
				}
				p.moveUntil(t, 2*refused)
				for range 5 { // they are tried again, in vain
					p.queue.TryRefusedNow()
					p.moveWithin(t, usualLimit)
				}
				if n := p.scheduled(t); n != 2*refused {
					t.Fatalf("%d wait, want %d", n, 2*refused)
				}
				p.exec(t, `drop trigger refuses`)
				p.moveUntil(t, 0)
				var order []string
				for _, r := range p.read(t) {
					order = append(order, r.MessageID)
				}
				for i := range refused {
					if bad, behind := slices.Index(order, fmt.Sprint("bad", i)), slices.Index(order, fmt.Sprint("behind", i)); bad < 0 || behind < bad {
						t.Errorf("bad%d came at %d, and what is behind it at %d", i, bad, behind)
					}
				}
				if len(order) != others+2*refused {
					t.Errorf("%d were moved", len(order))
				}
			})
		}
	}
}

// moveUntil moves until no more than so many wait.
func (p *fixture) moveUntil(t *testing.T, left int) {
	t.Helper()
	for calls := 0; p.scheduled(t) > left; calls++ {
		if calls == 300 {
			t.Fatalf("%d wait, want %d", p.scheduled(t), left)
		}
		if left == 0 {
			p.queue.TryRefusedNow()
		}
		p.moveWithin(t, usualLimit)
	}
}
