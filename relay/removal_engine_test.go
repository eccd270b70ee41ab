package relay

import (
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// A deletion that fails, or that others' locks keep from some rows, holds up neither
// reads nor publishes, until too much would be repeated after a crash.
func TestEngine_ADeletionThatFailsStopsNeitherReadsNorLanes(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	d.answer = func(*entry) error { return nil }
	fails := true
	confirm := func() {
		for {
			taken := d.nextPublish(d.now, d.now.Add(time.Second))
			if taken == nil {
				return
			}
			for _, m := range taken {
				d.outcome(m, d.now, nil)
			}
		}
	}
	step := func() {
		d.now = d.now.Add(50 * time.Millisecond)
		confirm()
		if d.removals.next(d.now, d.publishing.inFlight == 0) != nil {
			if fails {
				d.removed(d.now, removeAnswer{err: errors.New("locked"), retryIn: time.Millisecond})
			} else {
				d.removed(d.now, removeAnswer{})
			}
		}
	}
	sent := 0
	for range 20 {
		d.add(0, 10, "A", "")
		d.add(1, 10, "A", "k")
		step()
		if r := d.nextRead(d.now); r != nil {
			d.read(r, nil, d.now, nil)
		}
		sent += 20
	}
	if d.removals.undeleted() != sent {
		t.Errorf("%d of %d are confirmed and not deleted", d.removals.undeleted(), sent)
	}
	if d.lanes[0].bytes != 0 {
		t.Errorf("confirmed rows keep %d bytes", d.lanes[0].bytes)
	}
	fails = false
	for range 200 { // those that failed alone are tried again apart, and later
		step()
	}
	if d.removals.undeleted() != 0 || len(d.lanes[0].entries)+len(d.lanes[1].entries) != 0 {
		t.Errorf("%d are left", d.removals.undeleted())
	}
}

// Rows that others have locked are tried again apart from the rest, and are not
// published again when their lane comes back.
func TestEngine_LockedRowsAreTriedAgainApart(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	d.answer = func(*entry) error { return nil }
	d.taskTime = 0
	d.add(0, 10, "A", "")
	for {
		taken := d.nextPublish(d.now, d.now.Add(time.Second))
		if taken == nil {
			break
		}
		for _, m := range taken {
			d.outcome(m, d.now, nil)
		}
	}
	d.now = d.now.Add(time.Second)
	refs := d.removals.next(d.now, d.publishing.inFlight == 0)
	if len(refs) != 10 {
		t.Fatalf("%d to delete", len(refs))
	}
	d.removed(d.now, removeAnswer{locked: refs[:3]})
	if d.removals.undeleted() != 3 || len(d.lanes[0].entries) != 3 {
		t.Fatalf("%d are left", d.removals.undeleted())
	}
	if !d.idle(d.lanes[0]) {
		t.Error("a locked row keeps its lane from being given back")
	}
	d.drop(0)
	d.hold(0, relaystore.Taken{Epoch: 2}, d.now.Add(time.Hour))
	if added := d.lanes[0].add([]*entry{newEntry(outboxstore.Row{Ref: refs[0]})}); added != 0 {
		t.Error("a confirmed row is published again")
	}
	again := 0
	for range 100 {
		d.now = d.now.Add(time.Second)
		if refs := d.removals.next(d.now, d.publishing.inFlight == 0); refs != nil {
			again++
			d.removed(d.now, removeAnswer{locked: refs[:len(refs)-1]})
		}
	}
	if d.removals.undeleted() != 0 || again < 3 {
		t.Errorf("%d are left after %d tries", d.removals.undeleted(), again)
	}
}

// A confirm counts whenever it comes, wherever the row is by then.
func TestEngine_TakesConfirmsHoweverLate(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(d *drive, m *entry){
		"withheld":     func(*drive, *entry) {},
		"sent again":   func(d *drive, m *entry) { m.state = stateInFlight; d.publishing.inFlight++; m.lane.inFlight++ },
		"lane dropped": func(d *drive, _ *entry) { d.drop(0) },
		"read anew":    func(d *drive, m *entry) { d.forgetUnsent(); d.lanes[0].add([]*entry{newEntry(rowOfEntry(m))}) },
		"being charged": func(d *drive, m *entry) {
			d.circuits.purge(func(o *entry) bool { return o == m })
			d.charge(m, d.now, "x", "y")
		},
	} {
		d := newDrive(limits{}, 0)
		d.taskTime = 0
		d.add(0, 1, "A", "k")
		m := d.nextPublish(d.now, d.now.Add(time.Second))[0]
		d.outcome(m, d.now, Unavailable(errors.New("no confirm in time")))
		meanwhile(d, m)
		d.outcome(m, d.now, nil)
		d.now = d.now.Add(time.Second)
		refs := d.removals.next(d.now, d.publishing.inFlight == 0)
		if len(refs) != 1 || refs[0].ID != m.ID {
			t.Errorf("%s: to delete are %v", name, refs)
			continue
		}
		d.removed(d.now, removeAnswer{})
		d.outcome(m, d.now, nil) // once more
		d.now = d.now.Add(time.Second)
		if refs := d.removals.next(d.now, d.publishing.inFlight == 0); refs != nil {
			t.Errorf("%s: deleted twice: %v", name, refs)
		}
		if d.publishing.inFlight != 0 {
			t.Errorf("%s: %d in flight", name, d.publishing.inFlight)
		}
	}
}

func rowOfEntry(m *entry) outboxstore.Row {
	return outboxstore.Row{Ref: m.ref(), Topic: m.Topic, Key: m.Key, Payload: []byte("x")}
}

// What was read under a lease that has run out meanwhile counts for nothing: the row
// may be another worker's, or the server another one.
func TestEngine_AReadThatOutlivesItsLeaseCountsForNothing(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	d.lanes[0].trusted = d.now.Add(time.Second)
	r := d.nextRead(d.now)
	if r == nil {
		t.Fatal("no read")
	}
	d.now = d.now.Add(2 * time.Second)
	d.trust(0, 1, d.now.Add(time.Hour)) // renewed, too late
	d.read(r, []*entry{d.row(0, "A", "")}, d.now, nil)
	if n := len(d.lanes[0].entries); n != 0 {
		t.Errorf("%d rows of an old read are known", n)
	}
	if r := d.nextRead(d.now.Add(time.Second)); r == nil {
		t.Error("the lane is not read again")
	}
}

// What is handed to the sink in the last moment of a lease may arrive when the lane is
// another's.
func TestEngine_PublishesNothingShortlyBeforeItsLeaseEnds(t *testing.T) {
	t.Parallel()
	const reserve = 5 * time.Second
	for left, want := range map[time.Duration]int{reserve: 1, reserve - 1: 0, 0: 0} {
		d := newDrive(limits{reserve: reserve}, 0)
		d.add(0, 1, "A", "")
		d.lanes[0].trusted = d.now.Add(left)
		if n := len(d.nextPublish(d.now, d.now.Add(time.Second))); n != want {
			t.Errorf("%v before the end of the lease %d messages are published, want %d", left, n, want)
		}
	}
}

// After a read that failed, fewer lanes are read at a time, each in its turn.
func TestEngine_NarrowsReadsThatFail(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1, 2, 3, 4, 5, 6, 7)
	fail := func() *read {
		d.now = d.now.Add(2 * time.Second)
		r := d.nextRead(d.now)
		if r == nil {
			t.Fatal("no read")
		}
		d.read(r, nil, d.now, errors.New("no answer"))
		for _, l := range d.lanes[:8] {
			l.loaded = true
		}
		return r
	}
	seen := map[int]bool{}
	fail()
	fail()
	for range 40 {
		r := fail()
		if len(r.lanes) > 2 {
			t.Fatalf("%d lanes after failures", len(r.lanes))
		}
		for _, l := range r.lanes {
			seen[l.number] = true
		}
	}
	if len(seen) != 8 {
		t.Errorf("only lanes %v were read", seen)
	}
}

// Whatever had no answer, the database may be another server since, which lost its
// tail: what was read before and not sent is read again.
func TestEngine_ForgetsWhatWasReadFromADatabaseThatMayBeAnother(t *testing.T) {
	t.Parallel()
	for name, loss := range map[string]func(d *drive, r *read){
		"a read": func(d *drive, r *read) { d.read(r, nil, d.now, errors.New("connection reset")) },
		"a deletion beside a read": func(d *drive, r *read) {
			d.removed(d.now, removeAnswer{err: errors.New("connection reset"), lost: true, retryIn: time.Millisecond})
			d.read(r, []*entry{d.row(0, "A", "")}, d.now, nil)
		},
		"a look for commands beside a read": func(d *drive, r *read) {
			d.nextTask(d.now)
			d.taskDone(d.now, taskAnswer{err: errors.New("connection reset"), kind: taskLost, retryIn: time.Millisecond})
			d.read(r, []*entry{d.row(0, "A", "")}, d.now, nil)
		},
	} {
		d := newDrive(limits{window: 1}, 0)
		d.add(0, 5, "A", "")
		d.publishAll(func(*entry) error { return nil })
		d.add(0, 1, "A", "")
		d.now = d.now.Add(time.Second)
		if d.removals.next(d.now, d.publishing.inFlight == 0) == nil {
			t.Fatal("no deletion")
		}
		r := d.nextRead(d.now)
		if r == nil {
			t.Fatal("no read")
		}
		loss(d, r)
		d.lanes[0].loaded = true
		if taken := d.nextPublish(d.now, d.now.Add(time.Second)); taken != nil {
			t.Errorf("after the loss of %s message %d is published, which may not be there", name, taken[0].ID)
		}
	}
}
