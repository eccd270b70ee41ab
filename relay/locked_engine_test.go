package relay

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

var errLocked = errors.New("canceling statement due to lock timeout")

// Somebody has locked a table, or a row: what a lane has to write cannot be written. It is given back all the same,
// or nobody would send its messages meanwhile.
func TestEngine_ALockKeepsNoLaneThatIsGivenBack(t *testing.T) {
	t.Parallel()
	for name, owes := range map[string]func(d *drive) *entry{
		"a failure": func(d *drive) *entry {
			d.add(0, 1, "A", "k")
			d.publishAll(func(*entry) error { return Refused(errors.New("bad")) })
			return d.lanes[0].failing[0]
		},
		"a message that was delivered": func(d *drive) *entry {
			m := d.row(0, "A", "k")
			m.retrying = true
			d.lanes[0].add([]*entry{m})
			d.publishAll(delivered)
			return m
		},
	} {
		d := newDrive(limits{}, 0)
		m := owes(d)
		try := func() {
			for range 100 {
				if l := d.lanes[0]; l.draining {
					d.drain(0) // as a worker does that stops
				}
				d.now = d.now.Add(100 * time.Millisecond)
				if c := d.nextTask(d.now); c != nil {
					d.taskDone(d.now, taskAnswer{err: errLocked, kind: taskImpossible, retryIn: time.Millisecond})
				}
			}
		}
		try()
		d.drain(0)
		l := d.lanes[0]
		if d.idle(l) {
			t.Errorf("%s: the lane is given back without a try", name)
		}
		try()
		confirmed := m.state == stateConfirmed
		if !d.idle(l) || l.isUnsure() != confirmed {
			t.Fatalf("%s: it can be given back: %t, and the next worker is told: %t", name, d.idle(l), l.isUnsure())
		}
		d.drop(0)
		if !d.mayHold(0) {
			t.Fatalf("%s: it cannot be taken again", name)
		}
		d.hold(0, relaystore.Taken{Epoch: 2}, d.now.Add(time.Hour))
		d.lanes[0].loaded = true
		d.lanes[0].add([]*entry{newEntry(outboxstore.Row{Ref: m.ref(), Topic: "A", Key: "k", Payload: []byte("x")})})
		again := 0
		d.publishAll(func(*entry) error { again++; return nil })
		if (again == 0) != confirmed {
			t.Errorf("%s: sent again %d times", name, again)
		}
	}
}

// A command that the database refuses keeps no key that waits for another one.
func TestEngine_ACommandThatIsImpossibleKeepsNoKey(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	l := d.lanes[0]
	d.receive(l, relaystore.Command{DeadLetter: 1})
	d.receive(l, relaystore.Command{DeadLetter: 2, Key: "bad"})
	d.receive(l, relaystore.Command{DeadLetter: 3, Key: "k"})
	d.receive(l, relaystore.Command{DeadLetter: 4})
	d.add(0, 1, "A", "k")
	for range 100 {
		d.now = d.now.Add(time.Second)
		c := d.nextTask(d.now)
		if c == nil {
			continue
		}
		if c.lane == nil {
			d.taskDone(d.now, taskAnswer{found: func() {}})
			continue
		}
		_, err := c.do(taskContext{store: refusing{letters: []int64{1, 2}}})
		d.taskDone(d.now, taskAnswer{err: err, kind: taskImpossible, retryIn: time.Millisecond})
	}
	sent := 0
	d.publishAll(func(*entry) error { sent++; return nil })
	if sent != 1 || !slices.Equal(l.commands, []int64{1}) || !slices.Equal(l.commandedKeys, []string{"bad"}) {
		t.Errorf("%d messages were sent; left are %v, and of the keys %v", sent, l.commands, l.commandedKeys)
	}
}

// refusing refuses to carry out commands together with some dead letters.
type refusing struct {
	taskStore
	letters []int64
}

func (r refusing) CarryOut(_ context.Context, _ relaystore.Fence, letters []int64) (_, _ []relaystore.Key, err error) {
	for _, letter := range letters {
		if slices.Contains(r.letters, letter) {
			return nil, nil, errLocked
		}
	}
	return nil, nil, nil
}

// A lane that has shown that its messages kill no worker goes on, also if it cannot write which of them was refused.
func TestEngine_ALockKeepsNoLaneIsolated(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	l := d.lanes[0]
	l.failing, l.crashes, l.dry = []*entry{d.row(0, "A", "")}, isolatedFrom, true
	if d.crashesOver(l) {
		t.Error("a lane with a failure to write has nothing left")
	}
	if l.through = isolatedMessages; !d.crashesOver(l) {
		t.Error("it stays isolated")
	}
}

// Where a call may hang, a lane has a part of what may be in flight: the others go on.
func TestEngine_ALaneTakesNoMoreThanItsPart(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{window: 128, laneWindow: 8}, 0, 1)
	d.add(0, 300, "A", "")
	d.add(1, 3, "A", "")
	taken := map[int]int{}
	next := func() (n int) {
		for {
			some := d.nextPublish(d.now, d.now.Add(time.Second))
			if some == nil {
				return n
			}
			n += len(some)
			taken[some[0].Lane] += len(some)
			if some[0].Lane == 1 {
				d.outcome(some[0], d.now, nil)
			}
		}
	}
	next()
	d.add(1, 3, "A", "")
	next()
	if taken[0] != 8 || taken[1] != 6 {
		t.Errorf("in flight: %v", taken)
	}
	if l := d.lanes[0]; d.mayPublish(l, d.now) {
		t.Error("a probe may exceed the part of its lane")
	}
}

type unboundedSink struct{ Sink }

// A Router to sinks without such calls bounds no lane.
func TestWindows_ARouterBoundsNoLaneByItself(t *testing.T) {
	t.Parallel()
	router, err := NewRouter(Route{Topics: "a", Sink: unboundedSink{}}, Route{Topics: "#", Sink: unboundedSink{}})
	if err != nil {
		t.Fatal(err)
	}
	for _, configured := range []int{4, 1024} {
		if window, ofLane := windows(configured, router); window != configured || ofLane != configured {
			t.Errorf("Window %d: %d in flight, %d of a lane", configured, window, ofLane)
		}
	}
}

// With few calls, or a small window, too, one lane leaves room for others.
func TestWindows_NoLaneTakesAll(t *testing.T) {
	t.Parallel()
	for _, parallel := range []int{1, 2, 8, 32} {
		for _, configured := range []int{1, 2, 4, 8, 64, 1000} {
			sink, err := NewPublisherSink(nopPublisher{}, PublisherConfig{Parallel: parallel})
			if err != nil {
				t.Fatal(err)
			}
			window, ofLane := windows(configured, sink)
			if window > configured || window < 1 || ofLane < 1 || ofLane*min(parallel, 4) > max(window, 4) {
				t.Errorf("Parallel %d, Window %d: %d in flight, %d of a lane", parallel, configured, window, ofLane)
			}
			if hung := min(parallel, window) - 1; hung*ofLane >= window && configured >= 4*parallel {
				t.Errorf("Parallel %d, Window %d: %d calls that hang take all %d places", parallel, configured, hung, window)
			}
		}
	}
}
