package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// crowded is a configuration with little memory: 8 rows of a lane for each of Batch.
var crowded = relay.Config{Lease: unhurried.Lease, Batch: 8}

// Topics that nobody takes fill all memory, and more. What was committed behind
// them finds its way, whether one of them is stuck or several.
func TestRelay_FindsWhatLiesBehindStuckTopics(t *testing.T) {
	t.Parallel()
	for _, topics := range []int{1, 2} {
		t.Run(fmt.Sprint(topics, " stuck"), func(t *testing.T) {
			t.Parallel()
			eachDatabase(t, func(t *testing.T, p place) {
				broken := newBreakable(relay.Unavailable(errors.New("queue full")), func(m *relay.Message) bool {
					return strings.HasPrefix(m.Topic, "stuck")
				})
				box, w, cfg := p.box(t), &wire{}, crowded
				cfg.Batch = 2
				var all []*message.Message
				for i := range topics {
					more := unkeyed(1200 / topics)
					if i == 0 {
						for k := range more {
							more[k] = keyed(fmt.Sprint("s", k%150), k/150, 1)[0]
						}
					}
					commitTo(t, box, fmt.Sprint("stuck", i), more...)
					all = append(all, more...)
				}
				r := start(t, box, &sink{name: "w", wire: w, handle: broken.handle}, cfg)
				eventually(t, "they are tried", func() bool { return r.outcomes(t, "unavailable") > 3 })
				if n := p.count(t, `select count(*) from {{parked}}`); topics == 1 && n > 0 {
					t.Errorf("%d messages were set aside for nobody", n)
				}
				good := spread(20, 5)
				commitTo(t, box, "good", good...)
				all = append(all, good...)
				w.await(t, len(good))
				if n := p.count(t, `select count(*) from {{parked}} where attempts > 0`) + p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
					t.Errorf("%d messages were charged", n)
				}
				if n := r.counter(t, "oncemill.relay.set_aside"); n == 0 {
					t.Error("nothing had to be set aside: the test shows nothing")
				}
				broken.broken.Store(false)
				p.awaitNothingOwed(t)
				w.check(t, all, 0)
			})
		})
	}
}

// gone is a sink whose broker is away, and that knows it.
type gone struct{ *sink }

func (gone) Ready() bool { return false }

func (s gone) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	s.sink.Publish(ctx, msgs, done)
}

// A backlog is not moved while there is nobody to give it to.
func TestRelay_SetsNothingAsideInAnOutage(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p place) {
		broken := newBreakable(relay.Unavailable(errors.New("no connection")), nil)
		box, w := p.box(t), &wire{}
		first, second := unkeyed(4000), unkeyed(500)
		commitTo(t, box, "first", first...)
		commitTo(t, box, "second", second...)
		r := start(t, box, gone{&sink{name: "w", wire: w, handle: broken.handle}}, crowded)
		eventually(t, "tries", func() bool { return r.outcomes(t, "unavailable") > 8 })
		if n := p.count(t, `select count(*) from {{parked}}`); n > 0 {
			t.Errorf("%d messages were set aside", n)
		}
		broken.broken.Store(false)
		p.awaitNothingOwed(t)
		w.check(t, append(first, second...), 0)
	})
}

// Parked messages of a stuck topic stay where they are. However many they are, and
// however large, the lane's other messages go out, and are tried again.
func TestRelay_LeavesStuckMessagesInParked(t *testing.T) {
	t.Parallel()
	for name, stuck := range map[string]struct{ n, size int }{"many": {120, 10}, "large": {30, 64 << 10}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachDatabase(t, func(t *testing.T, p place) {
				box, w, cfg := p.box(t), &wire{}, crowded
				cfg.Retry = hasty
				full := newBreakable(relay.Unavailable(errors.New("queue full")), func(m *relay.Message) bool { return m.Topic == "stuck" })
				var refused sync.Map
				handle := func(ctx context.Context, m *relay.Message) error {
					if _, before := refused.LoadOrStore(m.MessageID, true); !before && strings.HasPrefix(m.MessageID, "odd") {
						return relay.Refused(errors.New("once"))
					}
					return full.handle(ctx, m)
				}
				all := ofLane("stuck", 3, stuck.n, stuck.size)
				commitTo(t, box, "stuck", all...)
				start(t, box, &sink{name: "w", wire: w, handle: handle}, cfg)
				good := 0
				send := func(prefix string) {
					t.Helper()
					more := ofLane(prefix, 3, 1, 10)
					commitTo(t, box, "good", more...)
					all = append(all, more...)
					good++
					w.await(t, good)
				}
				aside := func() int { return p.count(t, `select count(*) from {{parked}} where topic = 'stuck'`) }
				for i := 0; aside() < stuck.n/2; i++ {
					send(fmt.Sprint("good", i, "-"))
				}
				// Now all of them are due, and the lane has had time to take them.
				for i := range 20 {
					send(fmt.Sprint("odd", i, "-"))
				}
				if n := p.count(t, `select count(*) from {{parked}} where topic = 'stuck' and attempts > 0`) + p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
					t.Errorf("%d messages were charged for what is not their fault", n)
				}
				full.broken.Store(false)
				p.awaitNothingOwed(t)
				w.check(t, all, 0)
			})
		})
	}
}

// ofLane returns messages without a key of one lane.
func ofLane(prefix string, lane, n, size int) (msgs []*message.Message) {
	for i := 0; len(msgs) < n; i++ {
		if id := fmt.Sprint(prefix, i); outbox.Lane("", id) == lane {
			msgs = append(msgs, message.NewMessage(id, bytes.Repeat([]byte("x"), size)))
		}
	}
	return msgs
}
