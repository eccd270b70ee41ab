package relay_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// crowded is a configuration with little memory: 8 rows of a lane for each of Batch.
var crowded = relay.Config{Lease: unhurried.Lease, Batch: 8}

// Topics that nobody takes fill all memory, and more. What was committed behind
// them finds its way, whether one of them is stuck or several.
func TestRelay_FindsWhatLiesBehindStuckTopics(t *testing.T) {
	t.Parallel()
	for topics, database := range map[int]string{1: "SQLite", 2: "PostgreSQL"} {
		t.Run(fmt.Sprint(topics, " stuck"), func(t *testing.T) {
			t.Parallel()
			oneDatabase(t, database, func(t *testing.T, p testDB) {
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
				// A read may come on all of them in time, so that nothing has to be set aside:
				// the next ones need it.
				found := 0
				for rounds := 1; found == 0 || r.counter(t, "oncemill.relay.set_aside") == 0; rounds++ {
					if rounds > 20 {
						t.Fatal("nothing had to be set aside: the test shows nothing")
					}
					good := spread(20, 5*rounds)[found:]
					commitTo(t, box, "good", good...)
					all, found = append(all, good...), found+len(good)
					w.await(t, found)
				}
				if n := p.count(t, `select count(*) from {{parked}} where attempts > 0`) + p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
					t.Errorf("%d messages were charged", n)
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
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		broken := newBreakable(relay.Unavailable(errors.New("no connection")), nil)
		box, w, cfg := p.box(t), &wire{}, crowded
		cfg.Batch = testserver.Rounds(2, 8) // a lane keeps 8 times as many
		first, second := unkeyed(testserver.Rounds(1000, 4000)), unkeyed(testserver.Rounds(100, 500))
		commitTo(t, box, "first", first...)
		commitTo(t, box, "second", second...)
		r := start(t, box, gone{&sink{name: "w", wire: w, handle: broken.handle}}, cfg)
		eventually(t, "tries", func() bool { return r.outcomes(t, "unavailable") > 8 })
		if n := p.count(t, `select count(*) from {{parked}}`); n > 0 {
			t.Errorf("%d messages were set aside", n)
		}
		broken.broken.Store(false)
		p.awaitNothingOwed(t)
		w.check(t, append(first, second...), 0)
	})
}

// However many messages of a stuck topic there are, and however large, the lane's other
// messages go out, and are tried again. Many are set aside, and stay there.
func TestRelay_LeavesStuckMessagesInParked(t *testing.T) {
	t.Parallel()
	for name, stuck := range map[string]struct{ n, size int }{"many": {120, 10}, "large": {30, 64 << 10}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			oneDatabase(t, map[string]string{"many": "PostgreSQL", "large": "SQLite"}[name], func(t *testing.T, p testDB) {
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
				for i := 0; i < 20 || name == "many" && aside() < stuck.n/2; i++ {
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

// Thousands of messages, each of a topic that nobody takes, come before what is
// healthy. They are tried again at a rate that does not grow with their number.
func TestRelay_DeadTopicsDelayNobody(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) { // on SQLite there is TestRelay_LooksBehindWhatIsYetToFail
		const size = 2 << 10
		topics := 500
		if testserver.Long() {
			topics = 5000
		}
		var tried atomic.Int64
		broken := newBreakable(relay.Unroutable(errors.New("no queue")), func(m *relay.Message) bool { return strings.HasPrefix(m.Topic, "reply.") })
		handle := func(ctx context.Context, m *relay.Message) error {
			err := broken.handle(ctx, m)
			if err != nil {
				tried.Add(1)
			}
			return err
		}
		box, w, cfg := p.box(t), &wire{}, p.unhurried()
		cfg.Retry = hasty
		var dead []*message.Message
		for first := range topics / 500 {
			err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
				for i := range 500 {
					m := message.NewMessage(fmt.Sprint("dead", first*500+i), bytes.Repeat([]byte("x"), size))
					if err := box.Publisher(tx).Publish(fmt.Sprint("reply.", first*500+i), m); err != nil {
						return err
					}
					dead = append(dead, m)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		healthy := spread(100, testserver.Rounds(3, 10))
		commit(t, box, healthy...)
		begin := time.Now()
		start(t, box, &sink{name: "w", wire: w, handle: handle}, cfg)
		w.await(t, len(healthy))

		// What waits is in the table. Memory keeps what probes, and what was read last.
		eventually(t, "the dead topics are set aside", func() bool { return p.count(t, `select count(*) from {{parked}}`) > topics*9/10 })
		for i := range testserver.Rounds(8, 20) {
			more := spread(100, 1)
			for _, m := range more {
				m.UUID = fmt.Sprint("more", i, "/", m.UUID)
			}
			commit(t, box, more...)
			healthy = append(healthy, more...)
			w.await(t, len(healthy))
		}
		repeats, passed := tried.Load()-int64(topics), time.Since(begin)
		t.Logf("%d repeats in %v", repeats, passed)
		if most := int64(1000 + 150*passed.Seconds()); repeats > most {
			t.Errorf("messages that nobody takes were tried again %d times in %v, want at most %d", repeats, passed, most)
		}
		if n := p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
			t.Errorf("%d are dead letters", n)
		}
		broken.broken.Store(false)
		until(t, "nothing is owed", func() bool { return p.owed(t) == 0 }, func() int64 { return int64(w.count()) })
		w.check(t, append(dead, healthy...), 0)
	})
}

// Thousands of messages of one key wait behind its first one, which fails. Other keys
// of the lane do not wait for them.
func TestRelay_ABacklogBehindAFailureDelaysNoOtherKey(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		rows := testserver.Rounds(1_500, 4_000)
		if testserver.Long() && p.postgres() {
			rows = 20_000
		}
		keys := keysOfLane(5, 11)
		broken := newBreakable(relay.Refused(errors.New("too large")), func(m *relay.Message) bool { return m.MessageID == keys[0]+"/0" })
		box, w, cfg := p.box(t), &wire{}, p.unhurried()
		cfg.Retry, cfg.Batch = hasty, testserver.Rounds(64, 256) // a lane keeps 8 times as many
		behind := keyed(keys[0], 0, rows)
		for chunk := range slices.Chunk(behind, 1000) {
			commit(t, box, chunk...)
		}
		var healthy []*message.Message
		for _, key := range keys[1:] {
			healthy = append(healthy, keyed(key, 0, 50)...)
		}
		commit(t, box, healthy...)
		start(t, box, &sink{name: "w", wire: w, handle: broken.handle}, cfg)
		w.await(t, len(healthy))
		more := keyed(keys[1], 50, 50)
		commit(t, box, more...)
		healthy = append(healthy, more...)
		w.await(t, len(healthy))
		if n := p.owed(t); n < rows {
			t.Errorf("%d are owed of the %d behind the failure", n, rows)
		}
		broken.broken.Store(false)
		until(t, "nothing is owed", func() bool { return p.owed(t) == 0 }, func() int64 { return int64(w.count()) })
		w.check(t, append(behind, healthy...), 0)
	})
}

// A key has more messages, or larger ones, than its lane keeps in memory, of a topic that
// nobody takes. What other keys of the lane send meanwhile does not wait for them.
func TestRelay_ABacklogThatFailsDelaysNoOtherKeyOfItsLane(t *testing.T) {
	t.Parallel()
	for name, backlog := range map[string]struct{ n, size int }{"many": {300, 4 << 10}, "large": {40, 64 << 10}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			oneDatabase(t, map[string]string{"many": "PostgreSQL", "large": "SQLite"}[name], func(t *testing.T, p testDB) {
				const commits = 20
				keys := keysOfLane(5, 3)
				broken := newBreakable(relay.Unroutable(errors.New("no queue")), func(m *relay.Message) bool { return m.Topic == "dead" })
				var looks atomic.Int64
				db := p.tapped(t, func(_ *tapConn, text string, _ []driver.NamedValue) func() error {
					if strings.Contains(text, "fresh as materialized (") {
						looks.Add(1)
					}
					return nil
				})
				box, w, cfg := p.box(t), &wire{}, p.unhurried()
				cfg.Retry = hasty
				dead := keyed(keys[0], 0, backlog.n)
				for _, m := range dead {
					m.Payload = bytes.Repeat([]byte("x"), backlog.size)
				}
				commitTo(t, box, "dead", dead...)
				r := start(t, p.boxOn(t, db, outbox.NoHistory), &sink{name: "w", wire: w, handle: broken.handle}, cfg)
				eventually(t, "they fail", func() bool { return r.outcomes(t, "unroutable") > 1 })
				before := looks.Load()
				var others []*message.Message
				for i := range commits {
					more := append(keyed(keys[1], i, 1), keyed(keys[2], i, 1)...)
					commit(t, box, more...)
					others = append(others, more...)
					w.await(t, len(others))
				}
				// A look ahead finds them too, but comes a few times a second at most.
				if n := looks.Load() - before; n > commits/2 {
					t.Errorf("%d looks ahead for %d commits: the lane was not read on", n, commits)
				}
				if n := p.owed(t); n < len(dead) {
					t.Errorf("%d are owed of the %d that nobody takes", n, len(dead))
				}
				broken.broken.Store(false)
				p.awaitNothingOwed(t)
				w.check(t, append(dead, others...), 0)
			})
		})
	}
}
