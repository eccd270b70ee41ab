package relay

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// stack is an outbox in memory for a drive.
type stack struct {
	d    *drive
	rows []*entry
}

func (o *stack) put(lane int, topic, key string, n int) {
	for range n {
		o.rows = append(o.rows, o.d.row(lane, topic, key))
	}
}

func (o *stack) read(r *read) (entries []*entry) {
	known := make(map[outboxstore.Known]bool, len(r.Known))
	for _, k := range r.Known {
		known[k] = true
	}
	for _, lane := range r.Lanes {
		n := 0
		for _, m := range o.rows {
			if n == r.Rows {
				break
			}
			if m.Lane != lane || known[m.ref().Known()] || slices.Contains(r.Busy, m.Key) {
				continue
			}
			row := outboxstore.Row{Ref: m.ref(), Topic: m.Topic, Key: m.Key, Payload: m.Payload}
			if slices.Contains(r.Hollow, m.Topic) {
				row.Payload, row.Hollow = nil, true
			}
			entries = append(entries, newEntry(row))
			n++
		}
	}
	return entries
}

func (o *stack) remove(refs []outboxstore.Ref) {
	o.rows = slices.DeleteFunc(o.rows, func(m *entry) bool { return slices.Contains(refs, m.ref()) })
	o.d.removed(o.d.now, removeAnswer{})
}

// publishAll publishes whatever may go; answer says what becomes of it.
func (d *drive) publishAll(answer func(m *entry) error) {
	for taken := d.nextPublish(d.now, d.now.Add(time.Second)); taken != nil; taken = d.nextPublish(d.now, d.now.Add(time.Second)) {
		for _, m := range taken {
			d.outcome(m, d.now, answer(m))
		}
	}
}

func delivered(*entry) error { return nil }

// However many rows of a lane somebody has locked, the lane is read.
func TestEngine_ReadsALaneWithManyLockedRows(t *testing.T) {
	t.Parallel()
	for _, n := range []int{100, 128, 3000} {
		d := newDrive(limits{}, 0, 1)
		d.add(0, n, "A", "")
		d.publishAll(delivered)
		d.now = d.now.Add(time.Second)
		d.removed(d.now, removeAnswer{locked: d.removals.next(d.now, d.publishing.inFlight == 0)})
		reads := 0
		for range 100 {
			d.now = d.now.Add(500 * time.Millisecond)
			if refs := d.removals.next(d.now, d.publishing.inFlight == 0); refs != nil {
				d.removed(d.now, removeAnswer{locked: refs})
			}
			if r := d.nextRead(d.now); r != nil {
				if slices.Contains(r.Lanes, 0) {
					reads++
				}
				d.read(r, nil, d.now, nil)
			}
		}
		if reads < 10 {
			t.Errorf("%d locked: %d reads of their lane in 50 s", n, reads)
		}
	}
}

// A large message waits behind many of its key, which takes its time: meanwhile the lane is read
// for other keys. While it is in flight, too.
func TestEngine_ALargeMessageOfABusyKeyHoldsUpNoOtherKey(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	o := &stack{d: d}
	o.put(0, "A", "busy", 60)
	large := o.rows[40]
	large.Payload = make([]byte, d.limits.laneBytes)
	sizes := map[int]int{}
	var waits *entry // the one of the busy key that is in flight
	var since time.Time
	last := d.now // when another key moved
	for d.now.Sub(last) < 5*time.Second && len(o.rows) > 0 {
		d.now = d.now.Add(10 * time.Millisecond)
		if len(o.rows) > 0 && o.rows[0].Key == "busy" && d.now.UnixMilli()%100 == 0 {
			o.put(0, "A", fmt.Sprint("other", d.now.UnixMilli()%7), 1)
			d.wake()
		}
		if r := d.nextRead(d.now); r != nil {
			d.read(r, o.read(r), d.now, nil)
		}
		for taken := d.nextPublish(d.now, d.now.Add(time.Second)); taken != nil; taken = d.nextPublish(d.now, d.now.Add(time.Second)) {
			for _, m := range taken {
				if m.Key == "busy" {
					waits, since = m, d.now
					sizes[len(m.Payload)]++
					continue
				}
				last = d.now
				d.outcome(m, d.now, nil)
			}
		}
		takes := 500 * time.Millisecond
		if waits != nil && waits.size() > 1 {
			takes = 8 * time.Second
		}
		if waits != nil && d.now.Sub(since) >= takes {
			d.outcome(waits, d.now, nil)
			waits = nil
		}
		if d.nextTask(d.now) != nil {
			d.taskDone(d.now, taskAnswer{})
		}
		if refs := d.removals.next(d.now, d.publishing.inFlight == 0); refs != nil {
			o.remove(refs)
		}
	}
	if len(o.rows) > 0 {
		t.Errorf("no other key has moved for 5 s; %d rows are left", len(o.rows))
	}
	if sizes[1] != 59 || sizes[d.limits.laneBytes] != 1 {
		t.Errorf("messages of the busy key, by size: %v", sizes)
	}
}

// A lane may come back while what was confirmed of it is being deleted.
func TestEngine_KnowsRowsThatAreBeingDeletedWhenALaneComesBack(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	d.add(0, 10, "A", "")
	d.publishAll(delivered)
	d.now = d.now.Add(time.Second)
	refs := d.removals.next(d.now, d.publishing.inFlight == 0)
	d.removed(d.now, removeAnswer{locked: refs[:3]})
	d.drop(0)
	if !d.mayHold(0) {
		t.Fatal("a locked row keeps the lane away")
	}
	d.now = d.now.Add(3 * time.Second)
	if d.removals.next(d.now, d.publishing.inFlight == 0) == nil { // while the lane is taken
		t.Fatal("no deletion")
	}
	d.hold(0, relaystore.Taken{Epoch: 2}, d.now.Add(time.Hour))
	if d.lanes[0].add([]*entry{newEntry(outboxstore.Row{Ref: refs[0]})}) != 0 {
		t.Error("a confirmed row is published again")
	}
}

// One row cannot be deleted: the others are.
func TestEngine_OneRowThatCannotBeDeletedKeepsNoOther(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	o := &stack{d: d}
	o.put(0, "A", "", 1)
	bad := o.rows[0].ref()
	for range 200 {
		d.now = d.now.Add(50 * time.Millisecond)
		o.put(0, "A", "", 5)
		if r := d.nextRead(d.now); r != nil {
			d.read(r, o.read(r), d.now, nil)
		}
		d.publishAll(delivered)
		if refs := d.removals.next(d.now, d.publishing.inFlight == 0); slices.Contains(refs, bad) {
			d.removed(d.now, removeAnswer{err: errors.New("a trigger"), retryIn: 25 * time.Millisecond})
		} else if refs != nil {
			o.remove(refs)
		}
	}
	if len(o.rows) > 100 {
		t.Errorf("%d rows of 1,001 are left after 10 s", len(o.rows))
	}
}

// One confirmed row of parked cannot be deleted: the others are.
func TestEngine_OneRowOfParkedThatCannotBeDeletedKeepsNoOther(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	d.tasks.commandsAt = d.now.Add(time.Hour)
	var bad *entry
	for range 1000 {
		m := d.row(0, "A", "")
		m.retrying, m.lane, m.state = true, d.lanes[0], stateConfirmed
		d.tasks.retried = append(d.tasks.retried, m)
		if bad == nil {
			bad = m
		}
	}
	tries := 0
	for now := d.now; tries < 60 && len(d.tasks.retried) > 1; now = now.Add(time.Second) {
		c := d.nextTask(now)
		if c == nil {
			continue
		}
		tries++
		n := min(len(d.tasks.retried), d.tasks.retriedMost)
		if slices.Contains(d.tasks.retried[:n], bad) {
			d.taskDone(now, taskAnswer{err: errors.New("locked"), kind: taskImpossible, retryIn: time.Millisecond})
		} else {
			d.taskDone(now, taskAnswer{})
		}
	}
	if len(d.tasks.retried) != 1 || d.tasks.retried[0] != bad {
		t.Errorf("%d rows are left after %d tries", len(d.tasks.retried), tries)
	}
}

// What could probe a stuck topic is in a lane that cannot publish. Another lane has
// messages of it, which are read without their payloads.
func TestEngine_ProbesAStuckTopicFromALaneThatCanPublish(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	o, up := &stack{d: d}, false
	d.answer = func(m *entry) error {
		if m.Topic == "T" && !up {
			return errNack
		}
		return nil
	}
	reads := 0
	tick := func() {
		d.step(2 * time.Millisecond)
		if r := d.nextRead(d.now); r != nil {
			reads++
			d.read(r, o.read(r), d.now, nil)
		}
		d.step(0)
	}
	o.put(0, "T", "", 3)
	for range 1000 {
		tick()
	}
	d.lanes[0].trusted = d.now.Add(-time.Second) // its lease is not renewed
	o.put(1, "T", "", 3)
	for range 500 {
		tick()
	}
	up, reads = true, 0
	for range 30_000 { // a minute
		if tick(); d.passed["T"] > 0 {
			break
		}
	}
	if d.passed["T"] == 0 || reads > 1000 {
		t.Errorf("%d messages passed; %d reads", d.passed["T"], reads)
	}
}

// A failure cannot be written down for long. What is behind it leaves room.
func TestEngine_AKeyWhoseFailureCannotBeWrittenLeavesRoom(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	o := &stack{d: d}
	o.put(0, "A", "hot", 4000)
	o.put(0, "A", "", 500)
	passed, reads := 0, 0
	for range 20_000 { // 200 s
		d.now = d.now.Add(10 * time.Millisecond)
		d.publishAll(func(m *entry) error {
			if m.Key == "hot" {
				return Refused(errors.New("bad"))
			}
			passed++
			return nil
		})
		if refs := d.removals.next(d.now, d.publishing.inFlight == 0); refs != nil {
			o.remove(refs)
		}
		if c := d.nextTask(d.now); c != nil && c.lane != nil {
			d.taskDone(d.now, taskAnswer{err: errors.New("locked"), kind: taskImpossible, retryIn: time.Second})
		} else if c != nil {
			d.taskDone(d.now, taskAnswer{})
		}
		if r := d.nextRead(d.now); r != nil {
			reads++
			d.read(r, o.read(r), d.now, nil)
		}
	}
	if passed < 500 || reads > 5000 {
		t.Errorf("%d of 500 others of the lane were sent in 200 s, in %d reads", passed, reads)
	}
}

// A command that the database refuses lets the others of its lane be carried out, also
// beside a failure that cannot be written.
func TestEngine_ACommandThatIsImpossibleKeepsNoOther(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	d.add(0, 1, "A", "poison")
	d.publishAll(func(*entry) error { return Refused(errors.New("bad")) })
	l := d.lanes[0]
	for letter := range int64(10) {
		d.receive(l, relaystore.Command{DeadLetter: letter + 1, Lane: 0})
	}
	left := func() int { return len(l.commands) }
	for range 400 {
		d.now = d.now.Add(time.Second)
		c := d.nextTask(d.now)
		switch {
		case c == nil:
		case c.lane == nil:
			d.taskDone(d.now, taskAnswer{found: func() {}})
		case len(c.failures) > 0, l.commands[0] == 1, !l.oneByOne && slices.Contains(l.commands, 1):
			d.taskDone(d.now, taskAnswer{err: errors.New("refused"), kind: taskImpossible, retryIn: time.Millisecond})
		default:
			d.taskDone(d.now, taskAnswer{})
		}
	}
	if left() != 1 || l.commands[0] != 1 {
		t.Errorf("%d commands are left: %v", left(), l.commands)
	}
}

// The messages of parked that fail with a connection delay the next ones a little.
func TestEngine_ALostConnectionDelaysParkedMessagesALittle(t *testing.T) {
	t.Parallel()
	e, now := newEngine(limits{window: 16384}), time.Unix(1_000_000, 0)
	e.budget.left(now)
	for range 16384 {
		e.budget.spend(now)
	}
	if e.budget.left(now) > 0 || e.budget.left(now.Add(3*time.Second)) == 0 {
		t.Errorf("%d may go at once, %d after 3 s", e.budget.left(now), e.budget.left(now.Add(3*time.Second)))
	}
}

// Rows of a key are on their way to the retrying ones, of which the last is gone meanwhile.
// What a read under way brings of the key is behind them.
func TestEngine_AKeyThatIsSweptWaitsForTheSweep(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	l := d.lanes[0]
	l.startRetrying(l.chain("k"))
	l.sweep("k")
	l.endRetrying("k")
	d.add(0, 1, "A", "k")
	if taken := d.nextPublish(d.now, d.now.Add(time.Second)); len(taken) > 0 {
		t.Error("it is published before what is being moved")
	}
}

// What is read of a key while a failure of it is yet to be recorded waits for that: after a
// crash the message that failed would come again, behind it.
func TestEngine_WaitsForTheRecordOfAFailure(t *testing.T) {
	t.Parallel()
	for attempts, want := range map[int]int{1: 1, 2: 0} { // of the first: it is given up, or retried
		d := newDrive(limits{}, 0)
		d.limits.attempts.MaxAttempts = attempts
		publish := func() int { return len(d.nextPublish(d.now, d.now.Add(time.Second))) }
		d.add(0, 1, "A", "k")
		d.publishAll(func(*entry) error { return Refused(errors.New("bad")) })
		d.add(0, 1, "A", "k")
		if publish() > 0 {
			t.Errorf("%d attempts: the second is published before the failure of the first is recorded", attempts)
			continue
		}
		if c := d.nextTask(d.now); c == nil || len(c.failures) != 1 {
			t.Fatal("the failure is not recorded")
		}
		d.taskDone(d.now, taskAnswer{})
		if n := publish(); n != want {
			t.Errorf("%d attempts: %d are published once it is recorded, want %d", attempts, n, want)
		}
	}
}

// One key cannot be swept: the others are.
func TestEngine_AKeyThatCannotBeSweptKeepsNoOther(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.stays = "c"
	keys := []string{"a", "b", "c", "d", "e"}
	for _, key := range keys {
		r.lanes[0].sweep(key)
	}
	r.run(time.Second, time.Millisecond)
	slices.Sort(r.moved)
	if !slices.Equal(r.moved, []string{"a", "b", "d", "e"}) || len(r.lanes[0].swept) != 1 {
		t.Errorf("swept: %v, left: %v", r.moved, r.lanes[0].swept)
	}
}

// A lane whose first row takes longer to read than a read may is tried more and more
// rarely, and alone, so that the others are read meanwhile. In an outage of the whole
// database no lane is to blame.
func TestEngine_TriesALaneThatCannotBeReadRarely(t *testing.T) {
	t.Parallel()
	for _, lanes := range testserver.Rounds([]int{4, outbox.Lanes}, []int{1, 4, 16, outbox.Lanes}) {
		held := make([]int, lanes)
		for i := range held {
			held[i] = i
		}
		// A read that fails takes five seconds, one that does not forty milliseconds.
		run := func(lasts time.Duration, fails func(r *read) bool) (failed, alone int, worst time.Duration) {
			d := newDrive(limits{}, held...)
			begin, read := d.now, d.now // the last read of lane 0 that had an answer
			for d.now.Sub(begin) < lasts {
				d.now = d.now.Add(40 * time.Millisecond)
				d.wake() // something is committed all the time
				r := d.nextRead(d.now)
				switch {
				case r == nil:
					continue
				case fails(r):
					failed++
					if len(r.Lanes) == 1 {
						alone++
					}
					d.now = d.now.Add(5 * time.Second)
					d.read(r, nil, d.now, bounded.ErrAbandoned)
					for _, lane := range held {
						d.lanes[lane].loaded = true // again
					}
				default:
					d.read(r, nil, d.now, nil)
					if slices.Contains(r.Lanes, 0) {
						worst, read = max(worst, d.now.Sub(read)), d.now
					}
				}
			}
			return failed, alone, worst
		}
		bad := lanes - 1
		minutes := testserver.Rounds(20, 60)
		failed, alone, worst := run(time.Duration(minutes)*time.Minute, func(r *read) bool { return slices.Contains(r.Lanes, bad) })
		if lanes > 1 && (alone < minutes/2 || failed > 4*minutes/3) {
			t.Errorf("%d lanes: in %d minutes the lane was tried %d times alone, and %d reads failed", lanes, minutes, alone, failed)
		}
		if lanes > 1 && worst > 30*time.Second {
			t.Errorf("%d lanes: another one was not read for %v", lanes, worst)
		}
		failed, _, _ = run(10*time.Minute, func(*read) bool { return true })
		if failed < 100 { // five seconds each
			t.Errorf("%d lanes: in an outage of ten minutes %d reads were tried", lanes, failed)
		}
		// It ends: all lanes are read again after few reads, which may be slow.
		d := newDrive(limits{}, held...)
		d.wake()
		for range 200 {
			if r := d.nextRead(d.now); r != nil {
				d.read(r, nil, d.now, bounded.ErrAbandoned)
			}
			for _, lane := range held {
				d.lanes[lane].loaded = true
			}
			d.now = d.now.Add(time.Second)
		}
		seen, reads := map[int]bool{}, 0
		for len(seen) < lanes && reads < 200 {
			d.wake()
			d.now = d.now.Add(400 * time.Millisecond)
			if r := d.nextRead(d.now); r != nil {
				d.read(r, nil, d.now, nil)
				reads++
				for _, lane := range r.Lanes {
					seen[lane] = true
				}
			}
		}
		if most := 2 * bits.Len(uint(lanes)); reads > most || d.reads.breadth != outbox.Lanes {
			t.Errorf("%d lanes: after an outage %d were read in %d reads, at most %d are enough; now %d at a time", lanes, len(seen), reads, most, d.reads.breadth)
		}
	}
}
