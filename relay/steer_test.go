package relay_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// known is how long a worker on a busy machine may take to learn what operators have done.
const known = 4 * time.Second

var ada = steer.Act{By: "ada", Reason: "a test"}

// control returns the control of a database, with its tables.
func (p testDB) control(t testing.TB) *steer.Control {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), p.db, p.cfg, steer.Migrations); err != nil {
		t.Fatal(err)
	}
	c, err := steer.New(p.db, steer.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// counting counts what it gets by topic, and in which order.
type counting struct {
	mu     sync.Mutex
	counts map[string]int
	ids    map[string][]string // by key
	refuse atomic.Bool

	refused atomic.Int64
}

func newCounting() *counting { return &counting{counts: map[string]int{}, ids: map[string][]string{}} }

func (c *counting) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (c *counting) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	for _, m := range msgs {
		if c.refuse.Load() {
			c.refused.Add(1)
			done(m, relay.Refused(errors.New("no")))
			continue
		}
		c.mu.Lock()
		c.counts[m.Topic]++
		c.ids[m.Key] = append(c.ids[m.Key], m.MessageID)
		c.mu.Unlock()
		done(m, nil)
	}
}

func (c *counting) of(topic string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[topic]
}

func (c *counting) order(key string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.ids[key], " ")
}

// put commits a message.
func put(t testing.TB, box *outbox.Outbox, topic, key, id string) {
	t.Helper()
	m := message.NewMessage(cmp.Or(id, watermill.NewUUID()), []byte("payload"))
	outbox.SetKey(m, key)
	commitTo(t, box, topic, m)
}

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A worker that starts while a topic is paused sends nothing of it, not even at first.
func TestSteer_APauseSurvivesARestartAndKeepsKeysInOrder(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		control, box := p.control(t), p.box(t)
		sink := newCounting()
		do(t, control.Pause(t.Context(), steer.Target{Kind: steer.Topic, Name: "a"}, ada))
		put(t, box, "a", "k", "1")
		put(t, box, "b", "k", "2")
		put(t, box, "b", "other", "3")
		for range 2 {
			running := start(t, box, sink, p.unhurried())
			put(t, box, "b", "", "")
			before := sink.of("b")
			eventually(t, "others go on", func() bool { return sink.of("b") > before && sink.order("other") == "3" })
			running.stop()
		}
		if sink.of("a") > 0 || sink.order("k") != "" {
			t.Errorf("%d of the paused topic, %q of the key", sink.of("a"), sink.order("k"))
		}
		start(t, box, sink, p.unhurried())
		do(t, control.Resume(t.Context(), steer.Target{Kind: steer.Topic, Name: "a"}, ada))
		p.awaitNothingOwed(t)
		if got := sink.order("k"); got != "1 2" {
			t.Errorf("the key came as %q", got)
		}
	})
}

func TestSteer_ARunningWorkerLearnsOfEachKindOfPause(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		control, box := p.control(t), p.box(t)
		sink, other := newCounting(), newCounting()
		router, err := relay.NewRouter(relay.Route{Topics: "b.#", Name: "second", Sink: other}, relay.Route{Topics: "#", Sink: sink})
		do(t, err)
		start(t, box, router, p.unhurried())
		lane := outbox.Lane("k", "")
		elsewhere := "x"
		for n := 0; outbox.Lane(elsewhere, "") == lane; n++ {
			elsewhere = fmt.Sprint("x", n)
		}
		total := func() int { return sink.of("a") + other.of("b.1") }
		for _, target := range []steer.Target{{Kind: steer.Topic, Name: "a"}, {Kind: steer.Sink, Name: "#"}, {Kind: steer.Key, Name: "k"}, {Kind: steer.Lane, Name: fmt.Sprint(lane)}} {
			do(t, control.Pause(t.Context(), target, ada))
			time.Sleep(known)
			before, others := sink.of("a"), other.of("b.1")
			put(t, box, "a", "k", "")
			put(t, box, "b.1", elsewhere, "")
			eventually(t, "others go on", func() bool { return other.of("b.1") > others })
			time.Sleep(200 * time.Millisecond)
			if n := sink.of("a"); n != before {
				t.Errorf("%v: %d sent", target, n-before)
			}
			do(t, control.Resume(t.Context(), target, ada))
			eventually(t, target.String()+" goes on", func() bool { return sink.of("a") > before })
		}
		if total() != 8 {
			t.Errorf("%d messages delivered", total())
		}
	})
}

// A worker whose database is of before the tables of pauses works without them.
func TestSteer_WithoutItsTablesNothingIsPaused(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		box, sink := p.box(t), newCounting()
		start(t, box, sink, p.unhurried())
		put(t, box, "a", "", "")
		eventually(t, "it is delivered", func() bool { return sink.of("a") == 1 })
		do(t, p.control(t).Pause(t.Context(), steer.Target{Kind: steer.Topic, Name: "a"}, ada))
		time.Sleep(known)
		put(t, box, "a", "", "")
		put(t, box, "b", "", "")
		eventually(t, "others are delivered", func() bool { return sink.of("b") == 1 })
		if n := sink.of("a"); n != 1 {
			t.Errorf("%d delivered of the paused topic", n)
		}
	})
}

// A role of before the tables of pauses may not read them. Its relay delivers, and logs once which
// right it lacks. A pause that it knew before it lost the right applies on.
func TestSteer_WithoutTheRightToReadPausesNothingIsPaused(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	control, role := p.control(t), p.limitedRole(t)
	p.execute(t, `revoke all on {{pauses}} from `+role)
	sink, log := newCounting(), &logbook{}
	cfg := p.unhurried()
	cfg.Logger = slog.New(log)
	running := start(t, p.boxOn(t, p.open(t, "role="+role), outbox.NoHistory), sink, cfg)
	box := p.box(t)
	const (
		forbidden = "pauses may not be read, so nobody can pause what this relay publishes; grant select on the table pauses"
		unread    = "pauses could not be read; those read last apply, and a worker that has read none publishes nothing"
	)
	eventually(t, "it has tried to read them", func() bool { return log.count(forbidden)+log.count(unread) > 0 })
	if log.count(unread) > 0 {
		t.Fatal("it publishes nothing")
	}
	for n := 1; n <= 2; n++ {
		put(t, box, "a", "", "")
		eventually(t, "it is delivered", func() bool { return sink.of("a") == n })
		time.Sleep(known)
	}
	if n := log.count(forbidden); n != 1 {
		t.Errorf("logged %d times: %v", n, log.lines())
	}
	p.execute(t, `grant select on {{pauses}} to `+role)
	do(t, control.Pause(t.Context(), steer.Target{Kind: steer.Topic, Name: "a"}, ada))
	eventually(t, "the pause is known", func() bool { return log.count("pauses changed") > 0 })
	p.execute(t, `revoke select on {{pauses}} from `+role)
	eventually(t, "the right is gone", func() bool { return log.count(unread)+log.count(forbidden) > 1 })
	put(t, box, "a", "", "")
	for n := 1; n <= 3; n++ {
		put(t, box, "b", "", "")
		eventually(t, "others are delivered", func() bool { return sink.of("b") == n })
	}
	if n := sink.of("a"); n != 2 {
		t.Errorf("%d delivered of the paused topic", n)
	}
	running.stop()
}

// The time limit of a message that is retrying passes while its topic, or its lane, is paused. It
// gets one more attempt than the one after the resumption.
func TestSteer_APauseIsNotTimeOfAMessage(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		for _, target := range []steer.Target{{Kind: steer.Topic, Name: "a"}, {Kind: steer.Key, Name: "k"}, {Kind: steer.Lane, Name: fmt.Sprint(outbox.Lane("k", ""))}} {
			control, box, sink := p.control(t), p.box(t), newCounting()
			sink.refuse.Store(true)
			cfg := p.unhurried()
			cfg.Retry = relay.Retry{MaxAttempts: 1000, Initial: 500 * time.Millisecond, Max: 500 * time.Millisecond, TimeLimit: known + time.Second}
			running := start(t, box, sink, cfg)
			dead := p.count(t, `select count(*) from {{dead_letters}}`)
			put(t, box, "a", "k", "")
			eventually(t, "it is retrying", func() bool { return sink.refused.Load() > 0 && p.count(t, `select count(*) from {{parked}}`) > 0 })
			do(t, control.Pause(t.Context(), target, ada))
			time.Sleep(known)
			before := sink.refused.Load()
			time.Sleep(cfg.Retry.TimeLimit)
			if n := sink.refused.Load() - before; n > 0 || p.count(t, `select count(*) from {{dead_letters}}`) > dead {
				t.Fatalf("%v: %d attempts while it is paused", target, n)
			}
			do(t, control.Resume(t.Context(), target, ada))
			eventually(t, "it is a dead letter", func() bool { return p.count(t, `select count(*) from {{dead_letters}}`) > dead })
			if n := sink.refused.Load() - before; n != 2 {
				t.Errorf("%v: %d attempts after the resumption, want 2", target, n)
			}
			running.stop()
		}
	})
}

func TestSteer_ARefusedMessageIsRetriedNow(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		control, box, sink := p.control(t), p.box(t), newCounting()
		sink.refuse.Store(true)
		cfg := p.unhurried()
		cfg.Retry = relay.Retry{Initial: 24 * time.Hour, Max: 24 * time.Hour}
		start(t, box, sink, cfg)
		put(t, box, "a", "k", "")
		put(t, box, "b", "", "")
		eventually(t, "they are retrying", func() bool {
			return p.count(t, `select count(*) from {{parked}} where attempts = 1`) == 2
		})
		sink.refuse.Store(false)
		do(t, control.Retry(t.Context(), steer.Selection{Key: "k"}, ada))
		eventually(t, "the key is delivered", func() bool { return sink.of("a") == 1 })
		if sink.of("b") != 0 {
			t.Error("another message was retried, too")
		}
		do(t, control.Retry(t.Context(), steer.Selection{Topic: "b"}, ada))
		eventually(t, "the topic is delivered", func() bool { return sink.of("b") == 1 })
		eventually(t, "the commands are carried out", func() bool { return p.count(t, `select count(*) from {{lane_commands}}`) == 0 })
	})
}

func TestSteer_AReleasedLaneGoesToAnotherWorkerAndStaysThere(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		control := p.control(t)
		cfg := p.unhurried()
		owner := func(lane int) (name string) {
			t.Helper()
			for _, w := range []string{"one", "two"} {
				if p.count(t, `select count(*) from {{relay_leases}} l join {{relay_workers}} w on w.owner = l.owner where l.lane = $1 and w.name = $2`, lane, w) == 1 {
					name = w
				}
			}
			return name
		}
		cfg.Name = "one"
		start(t, p.box(t), newCounting(), cfg)
		eventually(t, "it has all lanes", func() bool { return p.leasesOf(t, "one") == outbox.Lanes+1 })
		epoch := p.count(t, `select epoch from {{relay_leases}} where lane = 5`)
		do(t, control.ReleaseLane(t.Context(), 5, ada))
		eventually(t, "the only worker takes it again", func() bool {
			return p.count(t, `select epoch from {{relay_leases}} where lane = 5`) > epoch && owner(5) == "one" && p.count(t, `select count(*) from {{lane_commands}}`) == 0
		})
		cfg.Name = "two"
		start(t, p.box(t), newCounting(), cfg)
		eventually(t, "they share", func() bool { return p.leasesOf(t, "two") >= outbox.Lanes/2 })
		lane := 0
		for owner(lane) != "one" {
			lane++
		}
		do(t, control.ReleaseLane(t.Context(), lane, ada))
		eventually(t, "the other one has it", func() bool {
			return owner(lane) == "two" && p.count(t, `select count(*) from {{lane_commands}}`) == 0
		})
		time.Sleep(known)
		if got := owner(lane); got != "two" {
			t.Errorf("it went back to %q", got)
		}
	})
}
