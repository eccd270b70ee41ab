package relay

import (
	"errors"
	"testing"
	"time"
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
