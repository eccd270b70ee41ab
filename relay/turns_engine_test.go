package relay

import (
	"context"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// A lane with two crashes sends to a topic that never answers. Its probes end after a second
// without an answer, and others follow them: but not in the same turn, or no other such lane
// would ever have one.
func TestEngine_ASilentTopicEndsItsLanesTurn(t *testing.T) {
	t.Parallel()
	const timeout = 3 * time.Second
	d := newDrive(limits{lease: 3 * time.Second}, 0, 1)
	silent := map[*entry]time.Time{}
	d.answer = func(m *entry) error {
		if m.Topic == "silent" {
			silent[m] = d.now
			return errSilence
		}
		return nil
	}
	lapse := func() {
		for m, since := range silent {
			if d.now.Sub(since) >= timeout {
				delete(silent, m)
				d.outcome(m, d.now, errNack)
			}
		}
	}
	d.add(0, 100, "silent", "")
	d.run(2*timeout, 10*time.Millisecond, lapse)
	if d.circuits.find("silent") == nil {
		t.Fatal("the topic has no trouble: the test shows nothing")
	}
	for _, n := range []int{0, 1} {
		d.lanes[n].crashes = 2
	}
	d.run(2*timeout, 10*time.Millisecond, lapse) // until nothing is in flight from before
	for round := range 5 {
		before := d.passed["fine"]
		d.add(1, 1, "fine", "")
		d.run(2*timeout, 10*time.Millisecond, lapse)
		if d.passed["fine"] == before {
			t.Fatalf("round %d: no turn for the other lane in %s", round, 2*timeout)
		}
	}
}

// A message that a worker has died of is recorded as alone in flight. While others of its lane are
// in flight, a probe must not be: one of those would be taken for it.
func TestEngine_RecordsNoProbeBesideMessagesInFlight(t *testing.T) {
	t.Parallel()
	for _, crashes := range []int{0, 2} {
		d := newDrive(limits{lease: time.Minute}, 0, 1)
		l := d.lanes[0]
		l.crashes = crashes
		var inFlight []*entry
		hold := true
		d.answer = func(m *entry) error {
			switch {
			case m.Topic == "down":
				return errNack
			case hold:
				inFlight = append(inFlight, m)
				return errSilence
			}
			return nil
		}
		d.add(1, 1, "down", "") // opens the circuit
		d.run(time.Second, 10*time.Millisecond, nil)
		d.lanes[1].retryAt = d.now.Add(time.Hour) // and probes no more
		d.circuits.find("down").retryAt = d.now.Add(time.Second)
		m := newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 0, ID: 1000}, Topic: "down"})
		m.crashed = true
		l.add([]*entry{m})
		d.run(100*time.Millisecond, 10*time.Millisecond, nil)
		d.add(0, 5, "up", "")
		d.run(100*time.Millisecond, 10*time.Millisecond, nil)
		if len(inFlight) != 5 || m.state != stateWithheld {
			t.Fatalf("%d crashes: %d messages are in flight, %d is in state %d", crashes, len(inFlight), m.ID, m.state)
		}
		d.run(time.Minute, 10*time.Millisecond, func() {
			if l.inFlight > 0 && l.announced != nil {
				t.Fatalf("%d crashes: message %d is recorded as alone beside %d in flight", crashes, l.announced.ID, l.inFlight)
			}
		})
		hold = false
		for _, m := range inFlight {
			d.outcome(m, d.now, nil)
		}
		sent := d.sent["down"]
		d.run(time.Minute, 10*time.Millisecond, nil)
		if d.sent["down"] == sent {
			t.Errorf("%d crashes: it probes not even after their outcomes", crashes)
		}
	}
}

// The record of one lane cannot be cleared: its statement hangs. Another lane that is to be recorded
// tries to clear it, too, which costs it one write, and then goes on without.
func TestEngine_ARecordThatCannotBeClearedHoldsUpNoOtherLane(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 3 * time.Second}, 0, 1)
	d.lanes[0].crashes, d.lanes[1].crashes = 2, 2
	d.add(0, 10, "A", "")
	d.lanes[1].stale, d.lanes[1].mustClear = true, true
	store := &hangingStore{lane: 1}
	sent := 0
	for range 20 {
		d.now = d.now.Add(20 * time.Millisecond)
		for taken := d.nextPublish(d.now, d.now.Add(time.Second)); taken != nil; taken = d.nextPublish(d.now, d.now.Add(time.Second)) {
			sent += len(taken)
		}
		c := d.nextTask(d.now)
		if c == nil || c.lane == nil {
			if c != nil {
				d.taskDone(d.now, taskAnswer{})
			}
			continue
		}
		found, err := c.do(taskContext{Context: t.Context(), store: store})
		if store.hung {
			store.hung, found, err = false, nil, context.DeadlineExceeded // and the whole task with it
		}
		answer := taskAnswer{found: found, err: err, retryIn: 10 * time.Millisecond}
		if err != nil {
			answer.kind = taskLost
		}
		d.taskDone(d.now, answer)
		d.lanes[0].loaded, d.lanes[1].loaded = true, true
		if len(d.lanes[0].entries) == 0 {
			d.add(0, 10, "A", "") // they were forgotten, and are read again
		}
	}
	if sent == 0 {
		t.Error("nothing was sent of the other lane")
	}
}

// hangingStore does not answer for one lane.
type hangingStore struct {
	taskStore
	lane int
	hung bool
}

func (s *hangingStore) SetAlone(_ context.Context, f relaystore.Fence, _ int64) error {
	if f.Lane == s.lane {
		s.hung = true
		return context.DeadlineExceeded
	}
	return nil
}
