package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// Two lanes with two crashes send to topics that never answer. Their probes end after a second
// without an answer, and others follow them: but not in the same turn, or no other such lane
// would ever have one.
func TestEngine_ASilentTopicEndsItsLanesTurn(t *testing.T) {
	t.Parallel()
	const timeout = 3 * time.Second
	d := newDrive(limits{lease: 3 * time.Second}, 0, 1, 2)
	silent := map[*entry]time.Time{}
	d.answer = func(m *entry) error {
		if m.Topic != "fine" {
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
	d.add(2, 100, "as silent", "")
	d.run(2*timeout, 10*time.Millisecond, lapse)
	if d.circuits.find("silent") == nil || d.circuits.find("as silent") == nil {
		t.Fatal("the topics have no trouble: the test shows nothing")
	}
	for _, n := range []int{0, 1, 2} {
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

// After two crashes that no message has caused, every lane is trusted again after one turn, which
// some of them share, although some messages fail: a lane that needed another turn would wait for
// all others.
func TestEngine_TrustsEachLaneAfterOneTurn(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]func(m *entry) error{
		"nothing fails":        func(*entry) error { return nil },
		"most are refused":     func(m *entry) error { return map[bool]error{true: Refused(errNack)}[m.ID%4 > 0] },
		"one of ten is nacked": func(m *entry) error { return map[bool]error{true: errNack}[m.ID%10 == 0] },
	} {
		const lanes = 16
		numbers := upTo(lanes)
		middle := func(below time.Duration) time.Duration { return below / 2 } // pauses are not left to chance
		d := newDrive(limits{lease: 3 * time.Second, draw: middle}, numbers...)
		d.taskTime, d.answer = 30*time.Millisecond, fails
		for _, n := range numbers {
			d.lanes[n].crashes = isolatedFrom
			for i := range 200 {
				d.add(n, 1, fmt.Sprint("topic ", i%20), "")
			}
		}
		turns, had, trusted := 0, (*lane)(nil), 0
		d.run(10*time.Second, time.Millisecond, func() {
			if l := d.isolation.turn; l != had && l != nil {
				turns++
			}
			had, trusted = d.isolation.turn, 0
			for _, n := range numbers {
				if d.lanes[n].crashes == 0 {
					trusted++
				}
			}
		})
		if trusted < lanes || turns > lanes/turnLanes {
			t.Errorf("%s: %d of %d lanes are trusted after %d turns", name, trusted, lanes, turns)
		}
	}
}

// A message that a worker has died of waits until the turn that its lane shares is over. Otherwise
// messages of the other lanes would be in flight beside it, and their crash would be laid to it.
func TestEngine_SendsNothingAloneInASharedTurn(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: time.Minute}, 0, 1)
	d.lanes[0].crashes, d.lanes[1].crashes = isolatedFrom, isolatedFrom
	var inFlight []*entry
	hold, alone := true, 0
	d.answer = func(m *entry) error {
		switch {
		case m.Lane == 1 && hold:
			inFlight = append(inFlight, m)
			return errSilence
		case m.crashed:
			alone++
		}
		return nil
	}
	suspect := d.row(0, "A", "")
	suspect.crashed = true
	d.add(0, 3, "A", "")
	d.lanes[0].add([]*entry{suspect})
	d.add(1, 3, "A", "")
	look := func() {
		if m := d.lanes[0].announced; m == suspect && d.lanes[1].inFlight > 0 {
			t.Fatalf("it is recorded as alone beside %d messages in flight", d.lanes[1].inFlight)
		}
	}
	d.run(time.Minute, 10*time.Millisecond, look)
	if len(inFlight) == 0 || d.passed["A"] != 3 {
		t.Fatalf("%d messages of one lane are in flight, %d of the other have passed: they share no turn", len(inFlight), d.passed["A"])
	}
	hold = false
	for _, m := range inFlight {
		d.outcome(m, d.now, nil)
	}
	d.run(time.Minute, 10*time.Millisecond, look)
	if alone != 1 {
		t.Errorf("it is sent %d times once it is alone", alone)
	}
}

// A lane has few keys, and a confirm takes a while: the turn that it shares is long enough for several
// messages of each key, or it would need another one.
func TestEngine_TrustsLanesOfFewKeysAfterOneTurn(t *testing.T) {
	t.Parallel()
	const lanes, confirm = 16, 25 * time.Millisecond
	numbers := upTo(lanes)
	d := newDrive(limits{lease: 3 * time.Second}, numbers...)
	d.taskTime = 10 * time.Millisecond
	for _, n := range numbers {
		d.lanes[n].crashes = isolatedFrom
		for i := range 200 {
			d.add(n, 1, "A", fmt.Sprint("key ", i%8))
		}
	}
	confirms := d.confirmAfter(confirm, func(*entry) {})
	turns, had, trusted := 0, (*lane)(nil), 0
	d.run(10*time.Second, time.Millisecond, func() {
		confirms()
		if l := d.isolation.turn; l != had && l != nil {
			turns++
		}
		had, trusted = d.isolation.turn, 0
		for _, n := range numbers {
			if d.lanes[n].crashes == 0 {
				trusted++
			}
		}
	})
	if trusted < lanes || turns > lanes/turnLanes {
		t.Errorf("%d of %d lanes are trusted after %d turns", trusted, lanes, turns)
	}
}

// A worker that has too many lanes keeps those with crashes: what they have shown would be lost.
func TestEngine_KeepsLanesWithCrashes(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1, 2, 3)
	d.lanes[2].crashes, d.lanes[1].draining = isolatedFrom, true
	if got := d.active(); !slices.Equal(got, []int{2, 0, 3}) {
		t.Errorf("%v are its lanes, the last ones to be given back first", got)
	}
}

// In a pipeline each message without an answer ends its term, also one that was alone in flight and
// waits in the table parked then: a sink that lost its connection takes nothing more of that term.
// (Simulation, seed 7282.)
func TestEngine_AMessageWithoutAnAnswerEndsItsTerm(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{order: OrderPerKeyPipelined}, 0)
	d.add(0, 1, "A", "")
	slow := d.nextPublish(d.now, d.now.Add(time.Second))
	if len(slow) != 1 {
		t.Fatalf("%d messages are in flight", len(slow))
	}
	slow[0].failedAt = slow[0].sent // for the second time, while others pass: it is blamed
	d.circuits.passed = slow[0].sent + 1
	d.circuits.findOrAdd("A").passed = d.circuits.passed
	d.now = d.now.Add(2 * time.Second)
	term := slow[0].Term
	d.outcome(slow[0], d.now, errNack)
	if got := d.lanes[0].term; got <= term {
		t.Errorf("the message may be sent again in its term, %d", got)
	}
}

// While a topic is unavailable its messages are read without payloads, if another can probe. These hold up
// no lane with crashes, before the topic is back or afterwards, though lanes without end have turns.
// Nor does a topic stay unavailable if only such a lane can probe.
func TestEngine_HollowMessagesCostNoLaneItsTurn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prober int
		others int // crashes of lane 3
	}{
		"the lane probes itself":           {prober: 2},
		"another lane probes":              {prober: 3},
		"another lane with crashes probes": {prober: 3, others: isolatedFrom},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDrive(limits{lease: 15 * time.Second}, 0, 1, 2, 3)
			o, up, passed := &stack{d: d}, false, map[string]int{}
			crashed, reads := map[int]int{0: singleFrom, 1: singleFrom}, 0
			d.answer = func(m *entry) error {
				if m.Topic == "A" && !up {
					return errNack
				}
				passed[m.Topic]++
				o.rows = slices.DeleteFunc(o.rows, func(r *entry) bool { return r.ref() == m.ref() })
				return nil
			}
			run := func(total time.Duration) {
				d.run(total, 2*time.Millisecond, func() {
					few := len(o.rows) < 200
					for n, crashes := range crashed { // and nothing shows that it was for nothing
						d.lanes[n].crashes, d.lanes[n].through = crashes, 0
						if few && n < 2 {
							o.put(n, "B", "", 50)
						}
					}
					if r := d.nextRead(d.now); r != nil {
						if slices.Contains(r.Lanes, 2) {
							reads++
						}
						d.read(r, o.read(r), d.now, nil)
					}
				})
			}
			o.put(c.prober, "A", "", 1)
			run(time.Second)
			crashed[2], crashed[3] = isolatedFrom, c.others
			o.put(2, "A", "", 5)
			o.put(2, "C", "", 5)
			run(2 * time.Second)
			if passed["C"] != 5 {
				t.Errorf("%d of 5 messages pass those of a topic that is unavailable", passed["C"])
			}
			if reads > 80 {
				t.Errorf("%d reads of messages whose topic has one with its payload", reads)
			}
			o.put(2, "A", "", 5)
			run(time.Second)
			up = true
			run(3 * time.Second)
			if passed["A"] != 11 || passed["B"] == 0 {
				t.Errorf("%d of 11 messages have passed 3 s after the outage, and %d of lanes with more crashes", passed["A"], passed["B"])
			}
		})
	}
}

// A message whose outcome is unclear is tried again alone, as a probe of its topic. A lane with
// crashes that has nothing else to send gets the turn for it.
func TestEngine_AnUnclearMessageGetsATurn(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 2 * time.Second}, 0, 1, 2)
	tries := 0
	d.answer = func(m *entry) error {
		if m.Topic != "A" {
			return nil
		}
		if tries++; tries <= 3 {
			return errors.New("unknown")
		}
		return nil
	}
	run := func(total time.Duration) {
		d.run(total, 2*time.Millisecond, func() {
			for _, n := range []int{0, 1} {
				d.lanes[n].crashes, d.lanes[n].through = singleFrom, 0
				d.add(n, 1, "B", "")
			}
		})
	}
	run(time.Second)
	d.lanes[2].crashes = isolatedFrom
	d.add(2, 1, "A", "")
	run(4 * time.Second)
	if tries < 4 || d.passed["A"] != 1 || d.passed["B"] < 100 {
		t.Errorf("after 4 s: %d tries, %d passed, beside %d of other lanes", tries, d.passed["A"], d.passed["B"])
	}
}

// A lane that needs no offer takes the turn before the one that has it: that one is next.
func TestIsolation_OffersTheTurnAgainToALaneThatWasOvertaken(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 2 * time.Second}, upTo(4)...)
	for n := range 3 {
		d.lanes[n].crashes = singleFrom
		d.add(n, 5, "A", "")
	}
	i := &d.isolation
	i.last, i.next, i.offered = 0, d.lanes[1], d.now
	m := d.row(3, "A", "")
	m.lane, m.crashed = d.lanes[3], true
	i.announce(m, d.now)
	i.turn, i.group, m.lane.announced = nil, nil, nil // its turn is over
	d.offerTurn(d.now)
	if i.next != d.lanes[1] {
		t.Errorf("lane %d has the next turn, want 1", i.next.number)
	}
}
