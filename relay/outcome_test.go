package relay_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// breakable is a broker that fails for some messages until it is mended.
type breakable struct {
	broken atomic.Bool
	err    error
	of     func(m *relay.Message) bool // which messages; nil: all
}

func newBreakable(err error, of func(*relay.Message) bool) *breakable {
	b := &breakable{err: err, of: of}
	b.broken.Store(true)
	return b
}

func (b *breakable) handle(_ context.Context, m *relay.Message) error {
	if b.broken.Load() && (b.of == nil || b.of(m)) {
		return b.err
	}
	return nil
}

// hasty tries again soon, and often.
var hasty = relay.Retry{Initial: 10 * time.Millisecond, Max: 50 * time.Millisecond, MaxAttempts: 1000}

// One message that cannot be delivered keeps what is behind it of its key, and
// nothing else, until its cause is mended.
func TestRelay_ParksAKeyBehindAMessageThatFails(t *testing.T) {
	t.Parallel()
	cause := errors.New("too large")
	for _, kind := range []struct {
		outcome  string
		err      error
		database string
	}{{"refused", relay.Refused(cause), "PostgreSQL"}, {"unroutable", relay.Unroutable(cause), "SQLite"}, {"unknown", cause, "PostgreSQL"}} {
		t.Run(kind.err.Error(), func(t *testing.T) {
			t.Parallel()
			oneDatabase(t, kind.database, func(t *testing.T, p testDB) {
				keys := keysOfLane(5, 2)
				broken := newBreakable(kind.err, func(m *relay.Message) bool { return m.MessageID == keys[0]+"/3" })
				box, w := p.box(t), &wire{}
				cfg := unhurried
				cfg.Retry = hasty
				r := start(t, box, &sink{name: "w", wire: w, handle: broken.handle}, cfg)

				commit(t, box, keyed(keys[0], 0, 4)...)
				eventually(t, "the message fails", func() bool { return r.outcomes(t, kind.outcome) >= 1 })
				var ofKey, others []*message.Message
				for i := range 20 {
					ofKey = append(ofKey, keyed(keys[0], 4+i, 1)...)
					others = append(others, keyed(keys[1], i, 1)...)
				}
				for lane := range outbox.Lanes {
					if lane != 5 {
						others = append(others, keyed(keysOfLane(lane, 1)[0], 0, 5)...)
					}
				}
				commit(t, box, slices.Concat(ofKey, others)...)
				w.await(t, 3+len(others))
				eventually(t, "the key is parked", func() bool { return p.count(t, `select count(*) from {{parked}}`) == 1+len(ofKey) })
				seen := r.outcomes(t, kind.outcome)
				eventually(t, "it fails on", func() bool { return r.outcomes(t, kind.outcome) > seen+1 })
				eventually(t, "only the key is owed", func() bool { return p.owed(t) == 1+len(ofKey) })
				if n := w.count(); n != 3+len(others) {
					t.Errorf("%d messages arrived, want the %d in front and of other keys", n, 3+len(others))
				}

				broken.broken.Store(false)
				p.awaitNothingOwed(t)
				all := slices.Concat(keyed(keys[0], 0, 4), ofKey, others)
				w.check(t, all, 0)
				if n := r.outcomes(t, "confirmed"); n != len(all) {
					t.Errorf("%d counted as confirmed, want %d", n, len(all))
				}
				if n := r.outcomes(t, "unavailable"); n != 0 {
					t.Errorf("%d counted as unavailable", n)
				}
			})
		})
	}
}

// While the broker is away messages wait, however long it takes, and nothing is
// counted against them.
func TestRelay_SpendsNothingOnAnOutage(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		broken := newBreakable(relay.Unavailable(errors.New("no connection")), nil)
		box, w := p.box(t), &wire{}
		r := start(t, box, &sink{name: "w", wire: w, handle: broken.handle}, unhurried)
		all := spread(40, 5)
		commit(t, box, all...)
		// One message at a time tries on, at a slower pace.
		eventually(t, "tries", func() bool { return r.outcomes(t, "unavailable") > 40+5 })
		if n := p.owed(t); n != len(all) {
			t.Errorf("%d rows owed, want all %d", n, len(all))
		}
		broken.broken.Store(false)
		p.awaitNothingOwed(t)
		w.check(t, all, 0)
		if n := r.outcomes(t, "refused") + r.outcomes(t, "unknown"); n != 0 {
			t.Errorf("%d counted as failed", n)
		}
		if n := r.outcomes(t, "confirmed"); n != len(all) {
			t.Errorf("%d counted as confirmed, want %d", n, len(all))
		}
	})
}

// Outcomes of all kinds at random, late and early, in any order.
func TestRelay_KeepsOrderWhateverTheOutcomes(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		o := ordeal{seed: seed(t)}
		decide := o.misbehave()
		box, w := p.box(t), &wire{}
		cfg := relay.Config{Lease: 3 * time.Second, PublishTimeout: 100 * time.Millisecond, Window: 32, Batch: 8, Retry: hasty}
		r := start(t, box, &sink{name: "w", wire: w, handle: func(ctx context.Context, m *relay.Message) error {
			answer, after := decide(frame{})
			if answer == silence {
				<-ctx.Done()
				return relay.Unavailable(ctx.Err())
			}
			testserver.Pause(ctx, after)
			return answer.err()
		}}, cfg)
		all := spread(50, 60)
		if !p.postgres() {
			all = all[:600]
		}
		commit(t, box, all...)
		p.awaitNothingOwed(t)
		w.check(t, all, 0)
		t.Logf("confirmed=%d refused=%d unknown=%d unavailable=%d", r.outcomes(t, "confirmed"),
			r.outcomes(t, "refused"), r.outcomes(t, "unknown"), r.outcomes(t, "unavailable"))
		if r.outcomes(t, "refused")+r.outcomes(t, "unknown")+r.outcomes(t, "unavailable") == 0 {
			t.Error("nothing failed: the run says nothing")
		}
	})
}

// A row whose metadata cannot be read is refused without the sink. It holds its
// key; once it has been mended in the table a worker that reads it anew sends it.
func TestRelay_RefusesARowThatItCannotRead(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		keys := keysOfLane(9, 2)
		box, w := p.box(t), &wire{}
		cfg := unhurried
		cfg.Retry = hasty
		msgs := slices.Concat(keyed(keys[0], 0, 2), keyed(keys[1], 0, 2), keyed(keysOfLane(10, 1)[0], 0, 2))
		commit(t, box, msgs...)
		p.execute(t, `update {{outbox}} set metadata = $1 where message_id = $2`, []byte(`{"a":`), keys[0]+"/0")
		r := start(t, box, &sink{name: "first", wire: w}, cfg)
		eventually(t, "refusals", func() bool { return r.outcomes(t, "refused") >= 2 })
		w.await(t, 4) // those of the other keys
		r.stop()
		for _, a := range w.all() {
			if a.message == keys[0]+"/0" || a.message == keys[0]+"/1" {
				t.Errorf("%s was sent", a.message)
			}
		}
		p.execute(t, `update {{parked}} set metadata = $1 where message_id = $2`, []byte(`{"oncemill_key":"`+keys[0]+`"}`), keys[0]+"/0")
		start(t, box, &sink{name: "second", wire: w}, cfg)
		p.awaitNothingOwed(t)
		w.check(t, msgs, 0)
	})
}
