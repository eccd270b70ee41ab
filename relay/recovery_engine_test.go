package relay

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// All lanes are isolated, as after two crashes under load: each has its turn within half a
// lease, however slow the database is.
func TestEngine_EveryIsolatedLaneMoves(t *testing.T) {
	t.Parallel()
	type setting struct {
		crashes int
		write   time.Duration
	}
	for _, s := range []setting{{2, time.Millisecond}, {2, 10 * time.Millisecond}, {2, 40 * time.Millisecond}, {3, time.Millisecond}, {3, 40 * time.Millisecond}, {singleFrom, time.Millisecond}, {singleFrom, 10 * time.Millisecond}, {singleFrom, 40 * time.Millisecond}} {
		write := s.write
		var numbers []int
		for n := range outbox.Lanes {
			numbers = append(numbers, n)
		}
		const lease = 2 * time.Second
		d := newDrive(limits{lease: lease}, numbers...)
		d.taskTime = write
		for _, n := range numbers {
			d.lanes[n].crashes = s.crashes
			d.add(n, 200, "A", "")
		}
		// A turn that is about to end lasts for one message more, and ends with a write.
		bound := max(lease/2, 3*outbox.Lanes*(write+2*time.Millisecond)) + time.Second/2
		began, moved := d.now, [outbox.Lanes]time.Time{}
		d.answer = func(m *entry) error {
			last := moved[m.Lane]
			if last.IsZero() {
				last = began
			}
			if gap := d.now.Sub(last); gap > bound {
				t.Errorf("%+v: lane %d did not move for %s", s, m.Lane, gap)
			}
			moved[m.Lane] = d.now
			return nil
		}
		d.run(2*bound, time.Millisecond, nil)
		for n, at := range moved {
			if at.IsZero() {
				t.Errorf("%+v: lane %d has not moved in %s", s, n, 2*bound)
			}
		}
	}
}

// Two crashes hit all lanes under load, and no message has caused them. A write takes long; the
// lanes are trusted again after two or three for each lane, not after one for each message.
func TestEngine_TrustsLanesAgainSoonAfterTwoCrashes(t *testing.T) {
	t.Parallel()
	var numbers []int
	for n := range outbox.Lanes {
		numbers = append(numbers, n)
	}
	d := newDrive(limits{lease: 3 * time.Second}, numbers...)
	d.taskTime = 100 * time.Millisecond // longer than a turn may last
	for _, n := range numbers {
		d.lanes[n].crashes = 2
		for k := range 50 {
			d.add(n, 1, "A", fmt.Sprint("key", k))
		}
	}
	writes := 0
	d.did = func(*task) { writes++ }
	d.answer = func(*entry) error { return nil }
	isolated := func() (n int) {
		for _, number := range numbers {
			if d.lanes[number].isolated() {
				n++
			}
		}
		return n
	}
	for writes < 6*outbox.Lanes && isolated() > 0 {
		d.step(time.Millisecond)
	}
	if n := isolated(); n > 0 {
		t.Errorf("after %d writes %d lanes are still isolated", writes, n)
	}
}

// In a long outage the pauses between probes grow. Once the sink reaches its broker, and lanes that
// were given up come back later, they wait for no such pause.
func TestEngine_ProbesAtOnceWhenTheSinkReachesItsBrokerAgain(t *testing.T) {
	t.Parallel()
	for range 20 { // pauses are drawn
		up := false
		d := newDrive(limits{lease: 3 * time.Second, reachable: func() bool { return up }}, 0, 1)
		d.add(0, 5, "A", "")
		d.add(1, 5, "B", "")
		d.answer = func(*entry) error {
			if !up {
				return errNack
			}
			return nil
		}
		d.run(time.Minute, 5*time.Millisecond, nil)
		for n := range 2 {
			d.drop(n)
		}
		up = true
		d.run(50*time.Millisecond, 5*time.Millisecond, nil) // there is nothing to probe with
		for n, topic := range []string{"A", "B"} {
			d.hold(n, relaystore.Taken{Epoch: 2}, d.now.Add(time.Hour))
			d.lanes[n].loaded = true
			d.add(n, 5, topic, "")
		}
		d.run(200*time.Millisecond, 5*time.Millisecond, nil)
		if d.passed["A"] != 5 || d.passed["B"] != 5 {
			t.Fatalf("200 ms after the lanes were taken: %v passed", d.passed)
		}
	}
}

// Some lanes are isolated when an outage of the broker ends: the others do not wait for them.
func TestEngine_IsolatedLanesDelayNoOtherAfterAnOutage(t *testing.T) {
	t.Parallel()
	numbers := upTo(16)
	d := newDrive(limits{lease: 2 * time.Second}, numbers...)
	d.taskTime = 20 * time.Millisecond
	for _, n := range numbers {
		if n < 12 {
			d.lanes[n].crashes = singleFrom
		}
		for range 100 {
			d.add(n, 1, "A", "")
			d.add(n, 1, "B", "")
		}
	}
	up := false
	passed := map[int]int{}
	d.answer = func(m *entry) error {
		if !up {
			return errNack
		}
		passed[m.Lane]++
		return nil
	}
	d.run(10*time.Second, time.Millisecond, nil)
	up = true
	d.run(4*time.Second, time.Millisecond, nil)
	for n := 12; n < 16; n++ {
		if passed[n] < 200 {
			t.Errorf("healthy lane %d has sent %d of 200 messages in 4 s", n, passed[n])
		}
	}
}

// After an outage most of what waits is hollow: it is read again, which must not use up what the
// topics may send at first.
func TestEngine_HollowMessagesUseUpNoCredit(t *testing.T) {
	t.Parallel()
	numbers := upTo(16)
	d := newDrive(limits{lease: 2 * time.Second}, numbers...)
	o, up, passed := &stack{d: d}, false, 0
	d.answer = func(m *entry) error {
		if !up {
			return errNack
		}
		passed++
		o.rows = slices.DeleteFunc(o.rows, func(r *entry) bool { return r.ref() == m.ref() })
		return nil
	}
	put := func(each int) {
		for _, n := range numbers {
			for range each {
				o.put(n, "A", "", 1)
				o.put(n, "B", "", 1)
			}
		}
	}
	run := func(total time.Duration) {
		d.run(total, 2*time.Millisecond, func() {
			if r := d.nextRead(d.now); r != nil {
				d.read(r, o.read(r), d.now, nil)
			}
		})
	}
	put(1)
	run(time.Second)
	put(20) // in the outage: nobody needs their payloads
	run(9 * time.Second)
	up = true
	run(2 * time.Second)
	if want := 16 * 2 * 21; passed < want {
		t.Errorf("%d of %d messages have passed 2 s after the outage", passed, want)
	}
}

// A topic is back, and its lane has a backlog of another one, which never ends: the messages that
// came in the outage pass, too.
func TestEngine_HollowMessagesPassBesideABacklog(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 2 * time.Second, window: 2}, 0)
	o, up, passed := &stack{d: d}, false, 0
	d.answer = func(m *entry) error {
		if m.Topic == "A" && !up {
			return errNack
		}
		if m.Topic == "A" {
			passed++
		}
		o.rows = slices.DeleteFunc(o.rows, func(r *entry) bool { return r.ref() == m.ref() })
		return nil
	}
	run := func(total time.Duration) {
		for end := d.now.Add(total); d.now.Before(end); d.now = d.now.Add(2 * time.Millisecond) {
			for n := len(o.rows); n < 200; n++ {
				o.put(0, "B", "", 1)
			}
			if r := d.nextRead(d.now); r != nil {
				d.read(r, o.read(r), d.now, nil)
			}
			for range 3 { // fewer than there are
				for _, m := range d.nextPublish(d.now, d.now.Add(time.Second)) {
					d.outcome(m, d.now, d.answer(m))
				}
			}
			if d.removals.next(d.now, d.publishing.inFlight == 0) != nil {
				d.removed(d.now, removeAnswer{})
			}
			if d.nextTask(d.now) != nil {
				d.taskDone(d.now, taskAnswer{})
			}
		}
	}
	o.put(0, "A", "", 1)
	run(time.Second)
	o.put(0, "A", "", 40)
	run(6 * time.Second)
	up = true
	run(10 * time.Second)
	if passed != 41 {
		t.Errorf("%d of 41 messages have passed 10 s after the outage", passed)
	}
}

// The confirm of the first messages after an outage is lost, of the whole broker or of one
// topic: others do not wait for as long as it may take to come.
func TestEngine_AProbeWithoutAnswerHoldsUpNothing(t *testing.T) {
	t.Parallel()
	for _, order := range []Order{OrderPerKey, OrderNone} {
		for _, topics := range []int{1, 3} {
			d := newDrive(limits{order: order}, 0, 1, 2, 3)
			for n := range 40 {
				d.add(n%4, 1, fmt.Sprint("topic ", n%topics), fmt.Sprint("key ", n))
			}
			up, lost := false, 0
			d.answer = func(*entry) error {
				switch {
				case !up:
					return errNack
				case lost < 2:
					lost++
					return errSilence
				}
				return nil
			}
			d.run(5*time.Second, 10*time.Millisecond, nil)
			up = true
			d.run(10*time.Second, 10*time.Millisecond, nil)
			passed := 0
			for _, n := range d.passed {
				passed += n
			}
			if lost != 2 || passed != 40-lost {
				t.Errorf("order %d, %d topics: %d passed, %d without an answer", order, topics, passed, lost)
			}
		}
	}
}

// Lanes that are not isolated write failures all the time. The isolated ones, which need a write
// for each message, have half of the writes all the same.
func TestEngine_IsolatedLanesHaveHalfOfTheWrites(t *testing.T) {
	t.Parallel()
	isolated, all := outbox.Lanes/2, []int{}
	for n := range outbox.Lanes {
		all = append(all, n)
	}
	d := newDrive(limits{lease: time.Minute}, all...)
	d.taskTime = 50 * time.Millisecond
	for _, n := range all {
		if n < isolated {
			d.lanes[n].crashes = singleFrom
		}
		d.add(n, 200, "A", "")
	}
	sent := 0
	d.answer = func(m *entry) error {
		if m.Lane < isolated {
			sent++
			return nil
		}
		return Refused(errors.New("on purpose"))
	}
	const tasks = 200
	d.run(tasks*d.taskTime, 10*time.Millisecond, func() {
		d.add(isolated+sent%isolated, 1, "A", "")
		d.tasks.commandsAt = d.now
	})
	if sent < tasks/3 {
		t.Errorf("%d messages of isolated lanes in the time of %d writes", sent, tasks)
	}
}

// Some lanes are isolated, next to each other, and the others are busy: each isolated lane has
// its turn, not only those that the busy ones lead to.
func TestEngine_IsolatedLanesTakeTurnsBesideBusyOnes(t *testing.T) {
	t.Parallel()
	const isolated = 8
	var all []int
	for n := range outbox.Lanes {
		all = append(all, n)
	}
	for _, busyLanes := range []int{1, 2, outbox.Lanes - isolated} { // the last ones: the rounds then begin with the first isolated one
		d := newDrive(limits{lease: 3 * time.Second}, all...)
		d.taskTime = 10 * time.Millisecond
		for n := range isolated {
			d.lanes[n].crashes = singleFrom
			d.add(n, 200, "A", "")
		}
		sent := map[int]int{}
		var unanswered []*entry
		d.answer = func(m *entry) error {
			sent[m.Lane]++
			unanswered = append(unanswered, m)
			return errSilence
		}
		busy := 0
		d.run(2*time.Second, time.Millisecond, func() {
			for _, m := range unanswered {
				d.outcome(m, d.now, nil)
			}
			unanswered = nil
			for range 3 {
				busy += 7
				d.add(outbox.Lanes-1-busy%busyLanes, 1, "A", "")
			}
		})
		for n := range isolated {
			if sent[n] == 0 {
				t.Errorf("%d busy lanes: lane %d has had no turn, the lanes have sent %v", busyLanes, n, sent)
			}
		}
	}
}

// Nothing at all of a recovery is answered: no more is sent than the window allows.
func TestEngine_ASilentRecoveryFillsTheWindowAtMost(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 3 * time.Second, window: letOut + 4}, 0, 1)
	down := true
	d.answer = func(*entry) error {
		switch {
		case down:
			return errNack
		case d.circuits.room > 0:
			return errSilence
		}
		return nil
	}
	d.add(0, 100, "topic 0", "")
	d.add(1, 100, "topic 1", "")
	d.run(3*time.Second, 10*time.Millisecond, nil)
	down = false
	most := 0
	d.run(20*time.Second, 10*time.Millisecond, func() { most = max(most, d.publishing.inFlight) })
	if most != d.limits.window {
		t.Errorf("%d messages are in flight, the window is %d", most, d.limits.window)
	}
}

// After an outage of the sink few messages are let out at first, and all of them stay without an answer. One
// more from time to time finds out that the sink works again.
func TestEngine_SendsOnWhereNothingOfARecoveryIsAnswered(t *testing.T) {
	t.Parallel()
	numbers := []int{0, 1, 2, 3}
	d := newDrive(limits{lease: 3 * time.Second}, numbers...)
	down, lost := true, 0
	d.answer = func(*entry) error {
		switch {
		case down:
			return errNack
		case lost < letOut && d.circuits.room > 0: // all of the room
			lost++
			return errSilence
		}
		return nil
	}
	for _, n := range numbers {
		d.add(n, 100, fmt.Sprint("topic ", n%2), "")
	}
	d.run(3*time.Second, 10*time.Millisecond, nil)
	if !d.circuits.sinkDown {
		t.Fatal("the sink is not down")
	}
	down = false
	d.run(4*time.Second, 10*time.Millisecond, func() {
		if at := d.trickleAt(); at.After(d.now) && d.wakeAt(d.now).After(at) {
			t.Fatal("the worker sleeps for longer than until it may send one more")
		}
	})
	if passed := d.passed["topic 0"] + d.passed["topic 1"]; lost != letOut || passed != 400-lost {
		t.Errorf("%d messages without an answer, and %d have passed", lost, passed)
	}
}

// A broker that is slow after its outage has confirmed a hundred messages after four answers, one after the
// other.
func TestEngine_RecoversInFewAnswers(t *testing.T) {
	t.Parallel()
	const answer = 300 * time.Millisecond
	d := newDrive(limits{lease: 3 * time.Second}, upTo(8)...)
	d.answer = func(*entry) error { return errNack }
	for n := range 8 {
		d.add(n, 100, fmt.Sprint("topic ", n%2), "")
	}
	d.run(3*time.Second, 10*time.Millisecond, nil)
	if !d.circuits.sinkDown {
		t.Fatal("the sink is not down")
	}
	passed, first := 0, time.Time{}
	confirm := d.confirmAfter(answer, func(*entry) {
		if passed++; first.IsZero() {
			first = d.now // of the probe
		}
	})
	d.run(10*time.Second, 10*time.Millisecond, func() {
		if first.IsZero() || d.now.Sub(first) < 4*answer {
			confirm()
		}
	})
	if passed < 100 {
		t.Errorf("%d messages have passed", passed)
	}
}

// A lane is read again for messages whose payload is needed now, but not while one of it is being recorded: it
// would forget that, again and again.
func TestEngine_ReadsNoLaneAgainThatIsAboutToSend(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	l, m := d.lanes[0], d.row(0, "A", "")
	m.hollow = true
	l.add([]*entry{m})
	l.ready.drop()
	d.circuits.withhold(m)
	topic := d.circuits.find("A")
	for name, refetch := range map[string]func(){
		"the topic recovers": func() { topic.refetch(d.now) },
		"a probe is due":     func() { d.refetchProbe(topic, d.now) },
	} {
		for _, announced := range []*entry{d.row(0, "B", ""), nil} {
			l.announced, l.refetch = announced, false
			if refetch(); l.refetch != (announced == nil) {
				t.Errorf("%s: about to send: %t; read again: %t", name, announced != nil, l.refetch)
			}
		}
	}
}
