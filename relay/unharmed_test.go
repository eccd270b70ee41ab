package relay_test

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// readings counts reads of the outbox, and those that were told to pass a key
// over.
type readings struct {
	table        string
	reads, aside atomic.Int64
}

func (r *readings) around(_ *tapConn, text string, args []driver.NamedValue) func() error {
	read := strings.Contains(text, "outbox_read") || // PostgreSQL
		strings.Contains(text, r.table) && strings.Contains(text, "order by") && !strings.Contains(text, "delete") && !strings.Contains(text, "insert")
	ahead := strings.Contains(text, "materialized") // a look at the newest rows, while the topic is in doubt
	if len(args) < 3 || !read || ahead {
		return nil
	}
	// The keys come after the rows that are known.
	busy := 4
	if _, rows := args[0].Value.(int64); rows {
		busy = 2 // SQLite: the lanes come last, one by one
	}
	if len(args) <= busy {
		return nil
	}
	r.reads.Add(1)
	if keys := fmt.Sprintf("%s", args[busy].Value); keys != "{}" && keys != "[]" {
		r.aside.Add(1)
	}
	return nil
}

// While a key is parked and its first message is tried again and again, what other
// keys have to send costs as many reads as before.
func TestRelay_OtherKeysPayNothingForAParkedOne(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		r := &readings{table: database.Of(p.cfg).Table("outbox")}
		box, w := p.boxOn(t, p.tapped(t, r.around), outbox.NoHistory), &wire{}
		keys := keysOfLane(5, 3)
		broken := newBreakable(relay.Refused(errors.New("too large")), func(m *relay.Message) bool { return m.MessageID == keys[0]+"/0" })
		cfg := p.unhurried()
		cfg.Retry, cfg.Batch = hasty, 32
		run := start(t, box, &sink{name: "w", wire: w, handle: broken.handle}, cfg)

		var all []*message.Message
		const commits, each = 30, 4
		// others sends messages of other keys, of the same lane and of others, and
		// waits for each lot. It returns the reads that this took.
		others := func(phase int) int64 {
			before := r.reads.Load()
			for i := range commits {
				var msgs []*message.Message
				for _, key := range []string{keys[1], keys[2], "elsewhere", "nowhere"} {
					msgs = append(msgs, keyed(key, phase*commits+i, 1)...)
				}
				commit(t, box, msgs...)
				all = append(all, msgs...)
				w.await(t, len(all))
			}
			return r.reads.Load() - before
		}
		p.awaitShares(t, map[string]int{"w": 32})
		alone := others(0)

		behind := keyed(keys[0], 0, 400)
		commit(t, box, behind...)
		parked := func() int { return p.count(t, `select count(*) from {{parked}}`) }
		eventually(t, "the key is parked", func() bool { return parked() == len(behind) })
		refusals := run.outcomes(t, "refused")
		beside := others(1)
		r.aside.Store(0) // by now the relay knows that it is
		for first := true; first || run.outcomes(t, "refused") < refusals+5; first = false {
			beside = min(beside, others(len(all)/(commits*each)))
		}
		if n := parked(); n != len(behind) {
			t.Errorf("%d are parked, want the %d of the key", n, len(behind))
		}
		if w.distinct() != len(all) {
			t.Errorf("%d messages arrived, %d of other keys were sent", w.distinct(), len(all))
		}
		if beside > 2*alone+10 {
			t.Errorf("%d reads while the key is parked, %d without that", beside, alone)
		}
		if n := r.aside.Load(); n > 0 {
			t.Errorf("%d reads had to pass over a key", n)
		}
		t.Logf("%d reads for %d messages, %d while the key was parked", alone, commits*each, beside)
		broken.broken.Store(false)
		p.awaitNothingOwed(t)
		w.check(t, slices.Concat(all, behind), 0)
	})
}
