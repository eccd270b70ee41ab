package relay_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// A lane has thousands of messages whose topics nobody takes, each of which has to be
// tried. Healthy ones that are committed behind them, with a key and without, do not
// wait for that; one whose key has a dead one before it does.
func TestRelay_LooksBehindWhatIsYetToFail(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) { // on PostgreSQL there is TestRelay_DeadTopicsDelayNobody
		const lane = 3
		dead := testserver.Rounds(1500, 3000)
		var one sync.Mutex
		var tried atomic.Int64
		broken := newBreakable(relay.Unroutable(errors.New("no queue")), func(m *relay.Message) bool { return strings.HasPrefix(m.Topic, "reply.") })
		handle := func(ctx context.Context, m *relay.Message) error {
			err := broken.handle(ctx, m)
			if err != nil {
				one.Lock()
				defer one.Unlock()
				testserver.Pause(t.Context(), 5*time.Millisecond) // all of them take seconds
				tried.Add(1)
			}
			return err
		}
		box, w, cfg := p.box(t), &wire{}, p.unhurried()
		cfg.Batch, cfg.Window, cfg.Retry = 32, 64, hasty
		keys := keysOfLane(lane, 11)
		var all []*message.Message
		for i, m := range ofLane("dead", lane, dead, 100) {
			commitTo(t, box, fmt.Sprint("reply.", i), m)
			all = append(all, m)
		}
		first := keyed(keys[10], 0, 1)
		commitTo(t, box, "reply.first", first...)
		start(t, box, &sink{name: "w", wire: w, handle: handle}, cfg)
		eventually(t, "they are tried", func() bool { return tried.Load() > 20 })
		var healthy []*message.Message
		for i := range 10 {
			more := append(keyed(keys[i], 0, 2), ofLane(fmt.Sprint("free", i, "-"), lane, 1, 10)...)
			commit(t, box, more...)
			healthy = append(healthy, more...)
		}
		behind := keyed(keys[10], 1, 1)
		commit(t, box, behind...)
		w.await(t, len(healthy))
		if n := tried.Load(); n > int64(dead)/2 {
			t.Errorf("%d of %d were tried before the healthy ones were sent", n, dead)
		}
		broken.broken.Store(false)
		until(t, "nothing is owed", func() bool { return p.owed(t) == 0 }, func() int64 { return int64(w.count()) })
		all = append(append(append(all, first...), healthy...), behind...)
		w.check(t, all, 0)
	})
}

// Memory is full of a stuck topic. A message of another one lies between its messages,
// further back than looks choose from.
func TestRelay_FindsWhatLiesBetweenStuckMessages(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		const lane = 3
		broken := newBreakable(relay.Unavailable(errors.New("queue full")), func(m *relay.Message) bool { return m.Topic == "stuck" })
		box, w, cfg := p.box(t), &wire{}, crowded
		stuck := ofLane("stuck", lane, 900, 10)
		good := ofLane("good", lane, 1, 10)
		commitTo(t, box, "stuck", stuck[:600]...)
		commitTo(t, box, "good", good...)
		commitTo(t, box, "stuck", stuck[600:]...)
		start(t, box, &sink{name: "w", wire: w, handle: broken.handle}, cfg)
		w.await(t, len(good))
		broken.broken.Store(false)
		until(t, "nothing is owed", func() bool { return p.owed(t) == 0 }, func() int64 { return int64(w.count()) })
		w.check(t, append(stuck, good...), 0)
	})
}
