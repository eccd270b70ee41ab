package relay_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// variety is a producer that commits messages of every kind until it is stopped, and
// what the sinks make of them.
type variety struct {
	clock *beats
	wire  *wire
	flaky int  // how often a message fails that fails at first
	flood bool // keys with very many messages behind one that fails
	held  bool // what is given up stays in parked
	huge  bool // messages that come in pieces

	rounds int // of commits; the producer's own

	mu                 sync.Mutex // guards what follows
	tries              map[string]int
	committed, arrived map[string]int64 // when, by the clock
	expected           []*message.Message
	dead               int
}

func newVariety(clock *beats) *variety {
	return &variety{clock: clock, wire: &wire{}, flaky: 2, tries: map[string]int{}, committed: map[string]int64{}, arrived: map[string]int64{}}
}

// handle is that of a sink.
func (f *variety) handle(_ context.Context, m *relay.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tries[m.MessageID]++
	fails := f.flaky
	if strings.HasPrefix(m.MessageID, "flaky/flood") {
		fails = 8 // long enough for what is behind it to come
	}
	switch {
	case strings.HasPrefix(m.MessageID, "dead"), strings.HasPrefix(m.MessageID, "flaky") && f.tries[m.MessageID] <= fails:
		return relay.Refused(errors.New("too large"))
	}
	if _, before := f.arrived[m.MessageID]; !before {
		f.arrived[m.MessageID] = f.clock.Load()
	}
	return nil
}

// start begins; stop ends it, and waits for the last commit.
func (f *variety) start(t testing.TB, box *outbox.Outbox) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() {
		for sleep.For(ctx, 200*time.Millisecond) {
			f.commit(t, box, f.rounds)
			f.rounds++
		}
	})
	stop = sync.OnceFunc(func() { cancel(); group.Wait() })
	t.Cleanup(stop)
	return stop
}

func (f *variety) commit(t testing.TB, box *outbox.Outbox, round int) {
	t.Helper()
	var prompt, failing, later []*message.Message
	each := 1 // few are deleted by their identity
	if round%4 == 0 {
		each = 8 // and many by their ctid
	}
	for k := range 20 {
		prompt = append(prompt, keyed(fmt.Sprint("key", k), round*8, each)...)
	}
	if round%4 == 1 {
		for range 8 {
			prompt = append(prompt, message.NewMessage("large/"+watermill.NewUUID(), bytes.Repeat([]byte("x"), 8<<10)))
		}
	}
	if f.huge && round%10 == 5 {
		prompt = append(prompt, message.NewMessage("huge/"+watermill.NewUUID(), bytes.Repeat([]byte("x"), 600<<10)))
		failing = append(failing, message.NewMessage("flaky/huge/"+watermill.NewUUID(), bytes.Repeat([]byte("x"), 600<<10)))
	}
	dead := 0
	if round%4 == 0 {
		for k := range 4 {
			key := fmt.Sprint("flaky", round, "/", k)
			first := keyed(key, 0, 2)
			first[1].UUID = "behind/" + first[1].UUID // fails never, and waits
			failing = append(failing, first...)
		}
		if dead = 2; round%8 > 0 {
			dead = 0
		}
		for range dead {
			msg := message.NewMessage("dead/"+watermill.NewUUID(), []byte("payload"))
			if f.held { // without a key there is nothing to hold
				outbox.SetKey(msg, msg.UUID)
			}
			failing = append(failing, msg)
		}
	}
	if f.flood && round%20 == 0 {
		failing = append(failing, keyed(fmt.Sprint("flaky/flood", round), 0, 1)...)
		behind := keyed(fmt.Sprint("flaky/flood", round), 1, 3000)
		for _, m := range behind {
			m.UUID = "behind/" + m.UUID
		}
		failing = append(failing, behind...)
	}
	if round%4 == 2 {
		later = unkeyed(4)
		for _, m := range later {
			outbox.SetDeliverAfter(m, 200*time.Millisecond)
		}
	}
	all := slices.Concat(prompt, failing, later)
	err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error { return box.Publisher(tx).Publish("orders", all...) })
	if err != nil {
		t.Errorf("commit: %v", err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead += dead
	for _, m := range all {
		if !strings.HasPrefix(m.UUID, "dead") {
			f.committed[m.UUID] = f.clock.Load()
			f.expected = append(f.expected, m)
		}
	}
}

// longest returns the longest time, by the clock, from the commit of a message to its
// delivery, of those committed since a time. One that has not arrived counts as if it
// did now. What is of a flood does not count: its head fails often, and a key takes its
// time for so many. Nor does what but names.
func (f *variety) longest(since int64, but map[string]bool) (beats int64, which string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, at := range f.committed {
		if but[id] {
			continue
		}
		arrived, ok := f.arrived[id]
		if !ok {
			arrived = f.clock.Load()
		}
		if strings.Contains(id, "flaky/flood") {
			continue
		}
		if arrived >= since && arrived-at >= beats {
			beats, which = arrived-at, id
		}
	}
	return beats, which
}

// check waits until nothing is owed and compares what arrived with what was committed.
func (f *variety) check(t testing.TB, p testDB) {
	t.Helper()
	p.awaitScheduled(t)
	owed, state := 0, "dead"
	if f.held {
		owed, state = f.dead, "held"
	}
	until(t, fmt.Sprint(owed, " messages are owed"), func() bool { return p.owed(t) == owed }, func() int64 { return int64(f.wire.count()) })
	f.wire.check(t, f.expected, math.MaxInt)
	letters := func() int { return p.count(t, `select count(*) from {{dead_letters}} where state = $1`, state) }
	until(t, fmt.Sprint(f.dead, " dead letters"), func() bool { return letters() == f.dead }, func() int64 { return int64(letters()) })
}

func (p testDB) awaitScheduled(t testing.TB) {
	t.Helper()
	eventually(t, "nothing is scheduled", func() bool { return p.count(t, `select count(*) from {{scheduled}}`) == 0 })
}

// add notes messages that a test has committed itself.
func (f *variety) add(msgs []*message.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expected = append(f.expected, msgs...)
}

// missing returns how many of some messages have not arrived.
func (f *variety) missing(msgs []*message.Message) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range msgs {
		if _, ok := f.arrived[m.UUID]; !ok {
			n++
		}
	}
	return n
}

// await waits until everything has arrived.
func (f *variety) await(t testing.TB) {
	t.Helper()
	until(t, "everything arrives", func() bool { return f.missing(f.expected) == 0 }, func() int64 { return int64(f.wire.count()) })
}
