package relay

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// rowOf is the identity of a row of the shelf, whose rows have no times.
func rowOf(id int64) rowID { return (&entry{Message: Message{ID: id}}).rowID() }

// rig drives an engine with a shelf.
type rig struct {
	*engine
	*memStore
	now    time.Time
	answer func(m *entry) (error, bool) // false: no answer yet
	sent   map[string]int
	flips  int
	hung   []*entry
}

func newRig(order Order, lanes ...int) *rig {
	r := &rig{memStore: newMemStore(), now: time.Unix(1_000_000, 0), sent: map[string]int{}}
	r.engine = newEngine(limits{
		window: 1024, laneRows: 256, laneBytes: 1 << 20, removeRows: 4000, linger: 20 * time.Millisecond,
		pollMin: 2 * time.Millisecond, pollMax: 250 * time.Millisecond, order: order,
		attempts: Retry{MaxAttempts: 10, Initial: time.Second, Max: 5 * time.Minute}, owner: "me",
	})
	r.circuits.changed = func(string, error) { r.flips++ }
	for _, n := range lanes {
		r.hold(n, relaystore.Taken{Epoch: 1}, r.now.Add(240*time.Hour))
		r.lanes[n].loaded = true
	}
	r.engine.due.lookFromStart(r.now)
	return r
}

func (r *rig) step(passes time.Duration) {
	r.now = r.now.Add(passes)
	for {
		taken := r.nextPublish(r.now, r.now.Add(time.Second))
		if taken == nil {
			break
		}
		for _, m := range taken {
			r.sent[m.Topic]++
		}
		for _, m := range taken {
			err, now := r.answer(m)
			if !now {
				r.hung = append(r.hung, m)
				continue
			}
			r.outcome(m, r.now, err)
		}
	}
	if r.removals.next(r.now, r.publishing.inFlight == 0) != nil {
		r.removed(r.now, removeAnswer{})
	}
	if c := r.nextTask(r.now); c != nil {
		found, err := c.do(taskContext{Context: context.Background(), store: r.memStore, clock: func() time.Time { return r.now }, moveOrDelete: alwaysMove})
		r.taskDone(r.now, taskAnswer{found: found, err: err, kind: taskErrorOf(err), retryIn: time.Millisecond})
	}
}

func (r *rig) run(total, each time.Duration) {
	for end := r.now.Add(total); r.now.Before(end); {
		r.step(each)
	}
}

// stick parks messages of a topic that is stuck, the two that probe in lane 0 and 500 in
// lane 1.
func (r *rig) stick() {
	for i := range 2 {
		r.put(0, int64(i+1), "A", "")
	}
	r.run(100*time.Millisecond, time.Millisecond)
	for i := range 500 {
		r.put(1, int64(i+1000), "A", "")
	}
	r.engine.due.lookFromStart(r.now) // as after setting them aside
	r.run(5*time.Second, time.Millisecond)
}

// A queue that is full takes one message a second: how many are handed to it?
func TestStuck_AQueueThatIsNearlyFullIsNotFlooded(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"outbox", "parked"} {
		r := newRig(OrderPerKey, 0, 1, 2, 3)
		var free time.Time
		passed := 0
		r.answer = func(m *entry) (error, bool) {
			if r.now.Before(free) {
				return errNack, true
			}
			free = r.now.Add(time.Second)
			passed++
			return nil, true
		}
		for i := range 2000 {
			id := int64(i + 1)
			if where == "parked" {
				r.put(i%4, id, "A", "")
			} else {
				r.lanes[i%4].add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: i % 4, ID: id}, Topic: "A"})})
			}
		}
		r.run(10*time.Second, time.Millisecond)
		r.sent["A"], r.flips, passed = 0, 0, 0
		lasts := testserver.Rounds(20*time.Second, time.Minute)
		r.run(lasts, time.Millisecond)
		if r.flips > 4 || r.sent["A"] > 20*passed || passed < int(lasts/(2*time.Second)) {
			t.Errorf("%s: in a minute, or less, %d passed of %d sent, %d changes told, %d looks brought %d rows", where, passed, r.sent["A"], r.flips, r.looks, r.rows)
		}
	}
}

// Both probes are of lanes that are being given back, with something in flight.
func TestStuck_LooksBesideADrainingLaneAreFew(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0, 1)
	up := false
	r.answer = func(m *entry) (error, bool) {
		switch {
		case m.Topic == "slow":
			return nil, false
		case up:
			return nil, true
		}
		return errNack, true
	}
	r.stick()
	r.lanes[0].add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 0, ID: 999}, Topic: "slow"})})
	r.step(time.Millisecond)
	r.looks, r.rows = 0, 0
	r.drain(0)
	for range 1000 {
		r.step(time.Millisecond)
	}
	if r.looks > 100 || r.rows > 100 {
		t.Errorf("in a second: %d looks, %d rows", r.looks, r.rows)
	}
	up = true
	r.run(10*time.Second, time.Millisecond)
	if len(r.parked) > 2 {
		t.Errorf("%d are parked still", len(r.parked))
	}
}

// The probes are of a lane whose sink hangs; nobody else is there to take it.
func TestStuck_OthersProbeWhenTheLaneOfTheProbesHangs(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0, 1)
	up := false
	r.answer = func(m *entry) (error, bool) {
		switch {
		case m.Topic == "hangs":
			return nil, false
		case up:
			return nil, true
		}
		return errNack, true
	}
	r.stick()
	r.lanes[0].add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 0, ID: 999}, Topic: "hangs"})})
	r.step(time.Millisecond)
	r.lanes[0].trusted = r.now // it is not renewed while it hangs
	up = true
	r.run(10*time.Minute, 10*time.Millisecond)
	if len(r.parked) > 2 {
		t.Errorf("%d of 502 are parked 10 minutes after the broker is back", len(r.parked))
	}
}

// The same with a probe that hangs itself.
func TestStuck_OthersProbeWhenAProbeHangs(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0, 1)
	up, hang := false, false
	r.answer = func(m *entry) (error, bool) {
		switch {
		case hang:
			hang = false
			return nil, false
		case up:
			return nil, true
		}
		return errNack, true
	}
	r.stick()
	hang = true
	r.run(5*time.Second, time.Millisecond)
	if len(r.hung) != 1 {
		t.Fatal("nothing hangs")
	}
	r.lanes[r.hung[0].Lane].trusted = r.now
	up = true
	r.run(10*time.Minute, 10*time.Millisecond)
	if len(r.parked) > 300 {
		t.Errorf("%d of 502 are parked 10 minutes after the broker is back", len(r.parked))
	}
}

// Of a stuck topic a few parked messages are kept to probe with, and nothing that is
// behind them in their keys, however often the topic opens; the rest is brought when it
// is free, in order.
func TestStuck_FewOfATopicAreInMemory(t *testing.T) {
	t.Parallel()
	for _, order := range []Order{OrderPerKey, OrderNone} {
		r := newRig(order, 0, 1)
		up := false
		var wire []int64
		r.answer = func(m *entry) (error, bool) {
			if m.Topic == "A" && !up {
				return errNack, true
			}
			wire = append(wire, m.ID)
			return nil, true
		}
		const keys, each = 20, 5
		id := int64(0)
		for range each {
			for k := range keys {
				id++
				r.put(k%2, id, "A", fmt.Sprint("key", k))
				r.lanes[k%2].chain(fmt.Sprint("key", k)).retrying = order != OrderNone
			}
		}
		for flap := range 3 {
			r.run(20*time.Second, time.Millisecond)
			known := 0
			for _, l := range r.lanes {
				if l == nil {
					continue
				}
				for _, m := range l.entries {
					known++
					if c := l.chains[m.Key]; order != OrderNone && (c.head != m || c.tail != m || c.length != 1) {
						t.Errorf("chain %+v of message %d", c, m.ID)
					}
				}
			}
			if known == 0 || known > 4 {
				t.Fatalf("order %v, flap %d: %d messages are kept", order, flap, known)
			}
			if looks := r.looks; flap > 0 && looks > 0 {
				r.looks = 0
				if looks > 100 {
					t.Errorf("order %v, flap %d: %d looks", order, flap, looks)
				}
			}
			r.put(0, 1000+int64(flap), "B", "") // something else passes
			r.engine.due.lookFromStart(r.now)
		}
		up = true
		r.run(20*time.Second, time.Millisecond)
		if len(r.parked) > 0 || len(r.circuits.topics) > 0 {
			t.Errorf("order %v: %d are parked still, %d circuits are left", order, len(r.parked), len(r.circuits.topics))
		}
		last := map[int64]int64{}
		for _, id := range wire {
			if key := id % keys; id < 1000 && order != OrderNone {
				if id < last[key] {
					t.Errorf("%d after %d of its key", id, last[key])
				}
				last[key] = id
			}
		}
	}
}

// What a former owner has settled is not sent, and holds nothing of its key up.
func TestStuck_WhatAFormerOwnerSettledIsForgotten(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = func(m *entry) (error, bool) { return errNack, m.Topic == "A" }
	r.put(0, 1, "A", "K")
	r.put(0, 2, "A", "")
	r.lanes[0].chain("K").retrying = true
	r.run(time.Second, time.Millisecond)
	known := r.lanes[0].entries[rowOf(1)]
	if known == nil || known.state != stateWithheld {
		t.Fatalf("the message is %+v: the test shows nothing", known)
	}
	delete(r.parked, 1)
	delete(r.timed, 1)
	r.lanes[0].loaded = false // as after a dead letter
	r.run(10*time.Millisecond, time.Millisecond)
	if r.lanes[0].chains["K"] != nil || r.lanes[0].entries[rowOf(1)] != nil || known.state != stateForgotten {
		t.Errorf("known of K: %+v, of its message: %+v", r.lanes[0].chains["K"], known)
	}
}

// A former owner whose confirm comes late makes a successor due without telling.
func TestStuck_LooksNowAndThenWhileKeysAreParked(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = func(*entry) (error, bool) { return nil, true }
	r.put(0, 1, "A", "K")
	delete(r.timed, 1) // held behind one that a former owner has in flight
	r.lanes[0].chain("K").retrying = true
	r.run(time.Second, time.Millisecond)
	r.timed[1] = true
	r.run(2*lookAnyway, 10*time.Millisecond)
	if len(r.parked) > 0 {
		t.Error("the successor was not found")
	}
}

// A lane whose lease was not trusted for a while is looked at as soon as it is again.
func TestStuck_LooksAtALaneThatIsTrustedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = func(*entry) (error, bool) { return nil, true }
	r.lanes[0].trusted = r.now
	r.put(0, 1, "A", "")
	r.run(time.Second, time.Millisecond)
	if r.looks > 0 && r.rows > 0 || len(r.parked) != 1 {
		t.Fatalf("%d looks brought %d rows", r.looks, r.rows)
	}
	r.trust(0, 1, r.now.Add(time.Hour))
	r.run(time.Second, time.Millisecond)
	if len(r.parked) > 0 {
		t.Error("the lane was not looked at again")
	}
}

// The lane that has a topic's parked messages is not looked at for a moment while the
// topic recovers.
func TestStuck_ALookThatSkipsALaneForgetsNoCircuit(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"", "untrusted", "not loaded"} {
		r := newRig(OrderPerKey, 0, 1)
		var free time.Time
		r.answer = func(m *entry) (error, bool) {
			if r.now.Before(free) {
				return errNack, true
			}
			free = r.now.Add(time.Second) // it takes one a second
			return nil, true
		}
		for i := range 2000 {
			r.put(1, int64(i+1), "A", "")
		}
		r.run(10*time.Second, time.Millisecond)
		for i := 0; ; i++ {
			r.step(time.Millisecond)
			if a := r.circuits.find("A"); a != nil && a.state == circuitHalfOpen && a.credit > 0 && len(a.withheld) == 0 && r.tasks.running == nil {
				break
			}
			if i > 100_000 {
				t.Fatal("it does not recover")
			}
		}
		l := r.lanes[1]
		switch how {
		case "untrusted":
			l.trusted = r.now.Add(-time.Millisecond)
		case "not loaded":
			l.loaded = false
			r.tasks.loadAt = r.now.Add(20 * time.Millisecond) // the load is still to come
		}
		r.engine.due.lookFromStart(r.now)
		r.run(20*time.Millisecond, time.Millisecond)
		if how == "untrusted" {
			r.trust(1, 1, r.now.Add(time.Hour))
		}
		r.sent["A"] = 0
		r.run(50*time.Millisecond, time.Millisecond)
		if r.sent["A"] > 20 {
			t.Errorf("%q: %d are sent to a queue that takes one a second", how, r.sent["A"])
		}
	}
}

// Very many topics are in trouble, and something of all of them is due. As many may fail as
// ever, but a look costs as much for one as for many.
func TestStuck_LooksForManyTopicsBringMany(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0, 1)
	r.answer = func(*entry) (error, bool) { return Unroutable(errors.New("no queue")), true }
	for i := range 2000 {
		r.put(i%2, int64(i+1), fmt.Sprint("reply.", i), "")
	}
	r.run(time.Minute, time.Millisecond)
	tried := 0
	for _, n := range r.sent {
		tried += n
	}
	if tried < 50*retriesPerSecond || r.looks > tried/20 {
		t.Errorf("in a minute %d looks, and %d tries", r.looks, tried)
	}
}
