package relay

import (
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// What failed is tried again after a pause, in which nothing is asked of the database, and at once when
// it answers heartbeats again.
func TestEngine_TriesAgainWhenTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	const pause = 2 * time.Second
	lost := errors.New("connection reset")
	d := newDrive(limits{}, 0, 1)
	d.add(0, 5, "A", "")
	d.publishAll(func(*entry) error { return nil })
	asks := func() (what []string) {
		if d.nextRead(d.now) != nil {
			what = append(what, "a read")
		}
		if d.removals.next(d.now, true) != nil {
			what = append(what, "a deletion")
		}
		if d.nextTask(d.now) != nil {
			what = append(what, "a task")
		}
		return what
	}
	d.now = d.now.Add(pause)
	r := d.nextRead(d.now)
	if r == nil || d.removals.next(d.now, true) == nil || d.nextTask(d.now) == nil {
		t.Fatal("nothing to lose")
	}
	fail := func(r *read) {
		r.retryIn = pause
		d.read(r, nil, d.now, lost)
		d.removed(d.now, removeAnswer{err: lost, lost: true, retryIn: pause})
		d.taskDone(d.now, taskAnswer{err: lost, kind: taskCollided, retryIn: pause})
		d.lanes[0].loaded, d.lanes[1].loaded = true, true // or there is nothing to read
	}
	fail(r)
	for end := d.now.Add(pause / 2); d.now.Before(end); {
		if what := asks(); len(what) > 0 {
			t.Fatalf("%q before the pause is over", what)
		}
		at := d.wakeAt(d.now)
		if !at.After(d.now) {
			t.Fatal("the loop does not rest in the pause")
		}
		d.now = at
	}
	d.databaseBack(d.now)
	r = d.nextRead(d.now)
	if what := asks(); r == nil || len(what) != 2 {
		t.Errorf("a read: %t, and %q, when the database is back", r != nil, what)
	}
	d.now = d.now.Add(time.Millisecond)
	d.databaseBack(d.now)
	fail(r)
	if what := asks(); len(what) != 3 {
		t.Errorf("only %q after calls that hung over the end of the outage", what)
	}
}

// Reading a lane may be what stops the database, each time. That it is back is then no reason to read
// the lane again.
func TestEngine_ReadsALaneThatStopsTheDatabaseNoSoonerWhenItIsBack(t *testing.T) {
	t.Parallel()
	for unreadable, want := range map[int]bool{1: true, 2: false} {
		d := newDrive(limits{}, 0)
		for range unreadable {
			d.reads.answered++ // of other lanes
			d.putOffReads(d.lanes[0], &read{began: d.now}, d.now)
		}
		d.databaseBack(d.now)
		if got := d.nextRead(d.now) != nil; got != want {
			t.Errorf("after %d failures: read at once: %v, want %v", unreadable, got, want)
		}
	}
}

// Nor does a lane wait because a read of it alone hung over the end of an outage.
func TestEngine_ReadsALaneAgainAfterAReadOfBeforeTheDatabaseWasBack(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	for _, hung := range []bool{true, false} {
		r := d.nextRead(d.now)
		d.now = d.now.Add(time.Second)
		if hung {
			d.databaseBack(d.now)
		}
		r.retryIn = time.Second
		d.read(r, nil, d.now, errors.New("connection reset"))
		d.lanes[0].loaded = true // or there is nothing to read
		if got := d.nextRead(d.now); (got != nil) != hung {
			t.Fatalf("hung over the end: %t; read again at once: %t", hung, got != nil)
		} else if hung {
			d.read(got, nil, d.now, nil)
			d.wake()
			d.now = d.now.Add(time.Second)
		}
	}
}

// While the database was away, reads of all lanes failed. That they did says nothing about the lanes: all are
// read at once when it is back. If that fails as well, they are read few at a time, as after any failure, until
// all have been read: one of them may stop the database each time.
func TestEngine_ReadsAllLanesAtOnceWhenTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	const lanes = 16
	d := newDrive(limits{}, upTo(lanes)...)
	lost := errors.New("connection reset")
	for _, step := range []struct {
		what string
		back bool
		err  error
		want int
	}{
		{"at first", false, lost, lanes},
		{"after a failure", false, lost, lanes / 4},
		{"when the database is back", true, lost, lanes},
		{"when it is back, after that has failed", true, nil, lanes / 4},
		{"when it is back, and some have been read: these have their turn", true, nil, lanes / 4},
	} {
		if step.back {
			d.databaseBack(d.now)
		}
		if got := d.readOnce(t, pass, step.err); got != step.want {
			t.Errorf("%s: %d lanes are read, want %d", step.what, got, step.want)
		}
	}
	for range lanes { // until all of them have been read, and some time longer
		d.readOnce(t, pass, nil)
	}
	d.readOnce(t, pass, lost)
	d.databaseBack(d.now)
	if got := d.readOnce(t, pass, nil); got != lanes {
		t.Errorf("after another outage %d lanes are read, want %d", got, lanes)
	}
}

// A large message that did not come in time has a pause of its own: pieces of it would take the time of all
// other reads, also just after an outage.
func TestEngine_WaitsWithTheRestOfALargeMessageAfterAnOutage(t *testing.T) {
	t.Parallel()
	for _, large := range []bool{false, true} {
		d := newDrive(limits{}, 0)
		r := &read{began: d.now}
		if large {
			r.short = map[int]error{0: errors.New("too slow")}
		}
		d.now = d.now.Add(time.Second)
		d.databaseBack(d.now)
		d.putOffReads(d.lanes[0], r, d.now)
		if waits := d.lanes[0].readAt.After(d.now); waits != large {
			t.Errorf("a large message: %t; its lane waits: %t", large, waits)
		}
	}
}

// Where a message counts as the one that can probe, others of its topic are read without payloads. So
// it must be able to.
func TestEngine_OnlyWhatCanProbeStandsForItsTopic(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(d *drive, m *entry)
		want   bool
	}{
		"it waits":                          {func(*drive, *entry) {}, true},
		"it has no payload":                 {func(_ *drive, m *entry) { m.hollow = true }, false},
		"its lane is given up":              {func(_ *drive, m *entry) { m.lane.draining = true }, false},
		"its topic is paused":               {func(d *drive, _ *entry) { d.paused.any, d.paused.now = true, pausedTopics("A") }, false},
		"it goes alone, its lane is quiet":  {func(_ *drive, m *entry) { m.crashed = true }, true},
		"it goes alone, its lane goes on":   {func(_ *drive, m *entry) { m.crashed, m.lane.inFlight = true, 1 }, false},
		"it goes alone when its turn comes": {func(_ *drive, m *entry) { m.crashed, m.lane.inFlight, m.lane.crashes = true, 1, isolatedFrom }, true},
	} {
		d := newDrive(limits{}, 0)
		d.add(0, 1, "A", "")
		d.publishAll(func(*entry) error { return errNack })
		topic := d.circuits.find("A")
		if topic == nil || len(topic.withheld) != 1 {
			t.Fatal("the topic has no trouble: the test shows nothing")
		}
		c.change(d, topic.withheld[0])
		if got := d.hasProbe(topic, d.now); got != c.want {
			t.Errorf("%s: %t, want %t", name, got, c.want)
		}
	}
}

// A lease says until when workers before may have sent without recording an answer. What they may have sent says
// so, from the outbox and from parked, and nothing else does. The next worker reads it in the lease again: it is
// told only what is new.
func TestEngine_KnowsWhatWorkersBeforeMayHaveSent(t *testing.T) {
	t.Parallel()
	for _, parked := range []bool{false, true} {
		for _, unsure := range []bool{false, true} {
			d := newDrive(limits{}, 0)
			d.drop(0)
			taken := relaystore.Taken{Epoch: 2, Crashes: 1}
			if unsure {
				taken.UnsureUntil = d.now.Add(time.Second)
			}
			d.hold(0, taken, d.now.Add(time.Hour))
			l := d.lanes[0]
			l.loaded = true
			add := func(m *entry) *entry {
				if !parked {
					l.add([]*entry{m})
					return m
				}
				d.addRetrying([]relaystore.Row{parkedRow(m, 1)}, d.now)
				return l.entries[m.rowID()]
			}
			before := add(d.row(0, "A", ""))
			d.now = d.now.Add(time.Minute)
			after := add(d.row(0, "A", ""))
			if before.unanswered != unsure || after.unanswered {
				t.Errorf("parked: %t, unsure: %t; it may have sent the message of before: %t, of after: %t", parked, unsure, before.unanswered, after.unanswered)
			}
			if l.isUnsure() {
				t.Errorf("parked: %t, unsure: %t: the next worker is told again", parked, unsure)
			}
			after.unanswered = true
			if !l.isUnsure() {
				t.Errorf("parked: %t, unsure: %t: the next worker is not told what is new", parked, unsure)
			}
			after.told = true
			if l.isUnsure() {
				t.Errorf("parked: %t, unsure: %t: the next worker is told what the row says", parked, unsure)
			}
		}
	}
}

// A message was delivered, and its row cannot be deleted, since somebody has locked it. The lane is handed on all
// the same, and the next worker sends the message again.
func TestEngine_TellsTheNextWorkerOfADeliveredMessageThatIsLocked(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	d.add(0, 1, "A", "")
	d.publishAll(delivered)
	d.now = d.now.Add(time.Second)
	refs := d.removals.next(d.now, true)
	d.removed(d.now, removeAnswer{locked: refs})
	if l := d.lanes[0]; len(refs) != 1 || !d.idle(l) || !l.isUnsure() {
		t.Errorf("%d rows are locked; the lane can be handed on: %t; the next worker is told: %t", len(refs), d.idle(l), l.isUnsure())
	}
}

// A message had no answer, and was forgotten, to be read again. Its confirm comes late, and its row is deleted: there
// is nothing left to tell.
func TestEngine_TellsNothingOfWhatIsDeleted(t *testing.T) {
	t.Parallel()
	for _, retrying := range []bool{false, true} {
		d := newDrive(limits{}, 0)
		l := d.lanes[0]
		m := d.row(0, "A", "")
		m.retrying = retrying
		l.know(m)
		l.enqueue(m)
		d.publishAll(func(*entry) error { return Unavailable(errors.New("connection lost")) })
		d.forgetUnsent()
		if !l.isUnsure() {
			t.Fatal("it is not remembered: the test shows nothing")
		}
		d.outcome(m, d.now, nil)
		d.answer = delivered
		for range 5 {
			d.step(time.Second)
		}
		if l.isUnsure() {
			t.Errorf("retrying: %t: the next worker is told", retrying)
		}
	}
}

// parkedRow returns a message as it is read from parked.
func parkedRow(m *entry, attempts int) relaystore.Row {
	return relaystore.Row{Row: outboxstore.Row{Ref: m.ref(), Topic: m.Topic, Key: m.Key, Payload: m.Payload}, Attempts: attempts}
}

// A message waits behind a failed one of its key, and is moved to parked with it. An attempt of it had no answer: in
// a pipeline it is sent together with the one before. Its own failure, later, says so.
func TestEngine_RemembersThatAFollowerMayHaveArrived(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{order: OrderPerKeyPipelined}, 0)
	l := d.lanes[0]
	first, second := d.row(0, "A", "k"), d.row(0, "A", "k")
	l.add([]*entry{first, second})
	d.publishAll(func(m *entry) error {
		if m.ID == first.ID {
			return Refused(errors.New("no"))
		}
		return Unavailable(errors.New("connection lost"))
	})
	if second.state != stateFollower || !second.unanswered {
		t.Fatalf("%v, without an answer: %t: the test shows nothing", second.state, second.unanswered)
	}
	for range 10 {
		d.step(time.Second)
	}
	if len(l.entries) > 0 || !l.isUnsure() {
		t.Errorf("%d messages are known; the next worker is told: %t", len(l.entries), l.isUnsure())
	}
	l.loaded = true
	d.addRetrying([]relaystore.Row{parkedRow(first, 1), parkedRow(second, 0)}, d.now)
	if m := l.entries[second.rowID()]; m == nil || !m.unanswered {
		t.Errorf("read again as %+v", m)
	}
}

// A read of all lanes hangs over the end of an outage. That it fails says nothing about them either. Nor does
// a lane that is paused, and so not read, keep the others in doubt.
func TestEngine_AnOutageIsNoFaultOfALane(t *testing.T) {
	t.Parallel()
	const lanes = 16
	d := newDrive(limits{}, upTo(lanes)...)
	lost := errors.New("connection reset")
	back := func() { d.databaseBack(d.now) }
	d.readOnce(t, back, lost)
	if got := d.readOnce(t, pass, lost); got != lanes {
		t.Errorf("after a read that hung over the end of an outage, %d lanes are read", got)
	}
	d.pause(pauses{lanes: [len(d.lanes)]bool{0: true}}, d.now)
	for range 2 * lanes {
		d.readOnce(t, pass, nil)
	}
	d.readOnce(t, pass, lost)
	back()
	if got := d.readOnce(t, pass, nil); got != lanes-1 {
		t.Errorf("a lane is paused that could not be read, and after an outage %d others are read", got)
	}
}

// A read that hung over the end of an outage, and was answered, says nothing about the lanes that it left out.
// If the read of all fails again, they are read few at a time.
func TestEngine_DropsItsDoubtOncePerOutage(t *testing.T) {
	t.Parallel()
	const lanes = 16
	d := newDrive(limits{}, upTo(lanes)...)
	lost, back := errors.New("connection reset"), func() { d.databaseBack(d.now) }
	d.readOnce(t, pass, lost)
	if few := d.readOnce(t, back, nil); few >= lanes {
		t.Fatal("all lanes are read: the test shows nothing")
	}
	if got := d.readOnce(t, pass, lost); got != lanes {
		t.Errorf("%d lanes are read when the database is back", got)
	}
	back()
	if got := d.readOnce(t, pass, nil); got >= lanes {
		t.Errorf("%d lanes are read after that has failed", got)
	}
}

// pass is what happens during a read of which nothing is to happen.
func pass() {}

// readOnce makes a read and returns of how many lanes it was.
func (d *drive) readOnce(t *testing.T, during func(), err error) int {
	t.Helper()
	d.now = d.now.Add(time.Second)
	d.wake()
	r := d.nextRead(d.now)
	if r == nil {
		t.Fatal("nothing is read")
	}
	d.now = d.now.Add(time.Second)
	during()
	d.read(r, nil, d.now, err)
	for _, l := range d.lanes {
		if l != nil {
			l.loaded = true // or there is nothing to read
		}
	}
	return len(r.lanes)
}
