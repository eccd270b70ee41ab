package relay

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"
)

// checkTurns looks at what the database names as in flight: that ends when it is over, and not before.
func (d *drive) checkTurns(t *testing.T) {
	t.Helper()
	i := &d.isolation
	for n, l := range d.lanes {
		if l == nil {
			continue
		}
		turns := 0 // that it has
		for _, o := range slices.Concat(i.group, i.ending) {
			if o == l {
				turns++
			}
		}
		switch {
		case turns > 1:
			t.Fatalf("lane %d has %d turns at once", n, turns)
		case l.together && i.turn != nil && i.turn.turnBegan.Before(l.turnBegan):
			t.Fatalf("lane %d may send for longer than until the next turn may begin", n)
		case l.mustClear && l.inFlight > 0:
			t.Fatalf("lane %d: the record is cleared while %d of its messages are in flight", n, l.inFlight)
		case turns == 0 && l.stale && !l.mustClear && d.tasks.running == nil: // otherwise it may be recorded just now
			t.Fatalf("lane %d: nothing is in flight, and nobody clears the record", n)
		}
	}
}

// Confirms are slow, and no lane has shown enough after one turn. Then the next lanes do not wait for
// what is in flight of the ones before: one turn after the other would take 2.9 s for 16 lanes, and
// two at once 2.3 s.
func TestEngine_SlowConfirmsDelayTheTurnsLess(t *testing.T) {
	t.Parallel()
	const confirm, most = 700 * time.Millisecond, 1600 * time.Millisecond
	for _, lanes := range []int{16, 6} {
		numbers := upTo(lanes)
		d := newDrive(limits{lease: 3 * time.Second}, numbers...)
		d.taskTime = 30 * time.Millisecond
		for _, n := range numbers {
			d.lanes[n].crashes = isolatedFrom
			for i := range 200 {
				d.add(n, 1, "A", map[bool]string{true: fmt.Sprint("key ", i%8)}[lanes == 16]) // no keys: more is ready all the time
			}
		}
		first := map[int]time.Duration{} // confirm of each lane
		began := d.now
		confirms := d.confirmAfter(confirm, func(m *entry) {
			if _, before := first[m.Lane]; !before {
				first[m.Lane] = d.now.Sub(began)
			}
		})
		d.run(10*time.Second, time.Millisecond, func() {
			confirms()
			d.checkTurns(t)
			if r := d.nextRead(d.now); r != nil { // so that it sleeps in between
				d.read(r, nil, d.now, nil)
			}
			if at := d.overlapAt(); at.After(d.now) && d.wakeAt(d.now).After(at) {
				t.Fatal("the worker sleeps longer than the turn may take")
			}
		})
		for _, n := range numbers {
			if after, ok := first[n]; !ok || after > most {
				t.Errorf("lane %d of %d: its first confirm came after %s", n, lanes, after)
			}
		}
	}
}

// A message that a worker has died of waits for messages of turns that overlap, too. And although
// confirms are slow and other lanes have enough to send, it is sent before they are through.
func TestEngine_SendsNothingAloneWhileTurnsOverlap(t *testing.T) {
	t.Parallel()
	const lanes = 24
	for place := range lanes { // of the lane of that message, so its turn comes beside others or not
		for _, crashes := range []int{0, isolatedFrom} {
			numbers := upTo(lanes)
			d := newDrive(limits{lease: 3 * time.Second}, numbers...)
			for _, n := range numbers {
				d.lanes[n].crashes = isolatedFrom
				for i := range 500 {
					d.add(n, 1, "A", fmt.Sprint("key ", i%2))
				}
			}
			l, suspect := d.lanes[place], d.row(place, "A", "")
			l.crashes, suspect.crashed = crashes, true
			l.forgetUnsent()
			l.loaded = true
			l.add([]*entry{suspect})
			overlap, alone := false, false
			confirms := d.confirmAfter(1200*time.Millisecond, func(m *entry) { alone = alone || m == suspect })
			d.run(9*time.Second, time.Millisecond, func() {
				confirms()
				d.checkTurns(t)
				recorded := 0
				for _, l := range d.lanes {
					if l != nil && l.inFlight > 0 {
						recorded++
					}
				}
				overlap = overlap || recorded > 2*turnLanes
				if recorded > 4*turnLanes {
					t.Fatalf("messages of %d lanes are in flight", recorded)
				}
				if recorded > 0 && l.announced == suspect || recorded > 1 && l.alone == suspect {
					t.Fatalf("lane %d, %d crashes: it is alone beside messages of %d lanes", place, crashes, recorded)
				}
			})
			if !overlap || !alone {
				t.Errorf("lane %d, %d crashes: overlapping turns: %t; sent alone: %t", place, crashes, overlap, alone)
			}
		}
	}
}

// A lane of a turn that has ended is trusted again while some of its messages are in flight, and sends
// without a pause from then on. The lanes that wait for their turn, and a message that must be alone,
// do not wait for that.
func TestEngine_ATrustedLaneDelaysNoTurn(t *testing.T) {
	t.Parallel()
	const lanes = 10
	numbers := upTo(lanes)
	d := newDrive(limits{lease: 3 * time.Second, window: 512}, numbers...)
	d.taskTime = 10 * time.Millisecond
	for _, n := range numbers {
		d.lanes[n].crashes = isolatedFrom
	}
	suspect := d.row(lanes-1, "A", "")
	suspect.crashed = true
	d.lanes[lanes-1].add([]*entry{suspect})
	sent, confirmed := map[*entry]time.Time{}, map[int]bool{}
	d.answer = func(m *entry) error {
		sent[m] = d.now
		return errSilence
	}
	trusted := false // one of those whose turn has ended
	d.run(10*time.Second, 5*time.Millisecond, func() {
		for n := range lanes - 1 {
			if d.lanes[n].ready.len() < 8 {
				d.add(n, 8, "A", "")
			}
		}
		for m, at := range sent {
			if d.now.Sub(at) >= time.Duration(300+m.ID%16*20)*time.Millisecond {
				delete(sent, m)
				d.outcome(m, d.now, nil)
				confirmed[m.Lane] = true
			}
		}
		d.checkTurns(t)
		trusted = trusted || slices.ContainsFunc(d.isolation.ending, func(l *lane) bool { return l.crashes == 0 })
	})
	if !trusted || len(confirmed) != lanes {
		t.Errorf("a lane trusted while its turn ended: %t; messages of %d of %d lanes were confirmed", trusted, len(confirmed), lanes)
	}
}

// The lane that has the turn is paused just when it and its companions are recorded, and resumed later:
// it is recorded again, but not the companions, which have sent for a while.
func TestEngine_ALaneHasItsTurnOnce(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 3 * time.Second}, 0, 1, 2, 3, 4, 5)
	d.taskTime = 5 * time.Millisecond
	for _, l := range d.lanes[:6] {
		l.crashes = isolatedFrom
		d.add(l.number, 25, "A", "key")
	}
	began, paused := d.now, false
	quick := true
	sent := map[*entry]time.Time{}
	d.answer = func(m *entry) error {
		sent[m] = d.now
		return errSilence
	}
	d.run(5*time.Second, time.Millisecond, func() {
		after := d.now.Sub(began)
		quick = quick && after < 228*time.Millisecond
		for m, at := range sent {
			took := time.Second
			switch {
			case quick && m.Lane == 2:
				took = 20 * time.Millisecond
			case quick:
				took = 300 * time.Millisecond
			}
			if d.now.Sub(at) >= took {
				delete(sent, m)
				d.outcome(m, d.now, nil)
			}
		}
		switch l := d.isolation.turn; {
		case !paused && l != nil && d.tasks.running != nil && d.tasks.running.lane == l:
			paused = true
			var to pauses
			to.lanes[l.number] = true
			d.pause(to, d.now)
		case d.lanes[1].paused && after > 230*time.Millisecond:
			d.pause(pauses{}, d.now)
		}
		d.checkTurns(t)
	})
	if !paused || d.passed["A"] > 0 || d.lanes[1].paused {
		t.Error("the lane with the turn was not paused and resumed")
	}
}

// Lanes that have turns of their own, after three crashes, overlap by two: after one more crash each
// message of them would be alone.
func TestEngine_FewLanesWithTurnsOfTheirOwnOverlap(t *testing.T) {
	t.Parallel()
	const lanes = 12
	d := newDrive(limits{lease: 3 * time.Second}, upTo(lanes)...)
	for n := range lanes {
		d.lanes[n].crashes = isolatedFrom + 1
		d.add(n, 100, "A", "key")
	}
	most, had := 0, map[int]bool{}
	confirms := d.confirmAfter(700*time.Millisecond, func(m *entry) { had[m.Lane] = true })
	d.run(10*time.Second, time.Millisecond, func() {
		confirms()
		d.checkTurns(t)
		inFlight := 0
		for _, l := range d.lanes[:lanes] {
			if l.inFlight > 0 {
				inFlight++
			}
		}
		most = max(most, inFlight)
	})
	if most != 2 || len(had) != lanes {
		t.Errorf("up to %d lanes had messages in flight; %d of %d lanes had their turn", most, len(had), lanes)
	}
}

// Nobody knows whether a turn was recorded, of the lane that has it and of those that share it. That is
// cleared, or a crash would count for lanes that had sent nothing.
func TestEngine_ClearsTheRecordsOfATurnThatWasLost(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(d *drive, l *lane){
		"no answer": func(d *drive, _ *lane) {
			d.taskDone(d.now, taskAnswer{err: context.DeadlineExceeded, kind: taskLost})
		},
		"its lane is gone": func(d *drive, l *lane) {
			d.drop(l.number)
			d.taskDone(d.now, taskAnswer{})
		},
	} {
		d := newDrive(limits{lease: 3 * time.Second}, upTo(2*turnLanes)...)
		d.taskTime, d.answer = 20*time.Millisecond, func(*entry) error { return nil }
		for n := range 2 * turnLanes {
			d.lanes[n].crashes = isolatedFrom
			d.add(n, 10, "A", "")
		}
		lost := false
		d.run(3*time.Second, time.Millisecond, func() {
			if c := d.tasks.running; c != nil && c.lane != nil && c.lane.announced != nil && !lost {
				lost = true
				lose(d, c.lane)
				for n, l := range d.lanes[:2*turnLanes] {
					if l != nil && len(l.entries) == 0 { // they are read again, but there is nothing any more
						d.lanes[n].loaded = true
					}
				}
			}
			d.checkTurns(t)
		})
		if !lost {
			t.Fatalf("%s: no turn was recorded", name)
		}
		for n, l := range d.lanes[:2*turnLanes] {
			if l != nil && l.stale {
				t.Errorf("%s: lane %d may be recorded as in flight, and nobody clears that", name, n)
			}
		}
	}
}

// A message is confirmed after all while its lane's turn is recorded, with others that share it. The next
// one must be alone, and is not sent beside those.
func TestEngine_NothingIsAloneBesideTheCompanionsOfAnother(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 3 * time.Second}, upTo(turnLanes)...)
	d.taskTime = 20 * time.Millisecond
	for n := range turnLanes {
		d.lanes[n].crashes = isolatedFrom
		d.add(n, 1, "A", "")
	}
	first := d.lanes[1] // to have the turn
	suspect := d.row(1, "A", "")
	suspect.crashed = true
	first.add([]*entry{suspect})
	cancelled, alone := false, false
	confirms := d.confirmAfter(100*time.Millisecond, func(m *entry) { alone = alone || m == suspect })
	d.run(3*time.Second, time.Millisecond, func() {
		if m := first.announced; !cancelled && m != nil && m != suspect && d.tasks.running != nil {
			cancelled = true
			d.confirmLate(m, d.now)
		}
		confirms()
		d.checkTurns(t)
		for n, l := range d.lanes[:turnLanes] {
			if l != first && l.inFlight > 0 && (first.announced == suspect || first.alone == suspect) {
				t.Fatalf("a message is alone beside those of lane %d", n)
			}
		}
	})
	if !cancelled || !alone {
		t.Errorf("the first message was confirmed meanwhile: %t; the other was sent: %t", cancelled, alone)
	}
}

// The last message of a lane whose turn was ending has its outcome, and nobody has noticed yet that the turn
// is over. The lane shares no other turn, or the record of that one would be cleared as that of the first.
func TestEngine_ALaneThatEndsItsTurnIsNoCompanion(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 3 * time.Second}, upTo(turnLanes)...)
	for n := range turnLanes {
		d.lanes[n].crashes = isolatedFrom
		d.add(n, 1, "A", "")
	}
	first, ending := d.lanes[0], d.lanes[2]
	d.isolation.announce(first.ready.next(), d.now)
	d.isolation.ending = []*lane{ending}
	if with := d.companions(first, d.now); len(with) != turnLanes-2 || slices.Contains(with, ending) {
		t.Errorf("%d lanes share the turn", len(with))
	}
}

// A message that must be alone follows others of its lane, which are recorded, and is not sent after all.
// The record is cleared, or a crash would count for a lane that has nothing in flight.
func TestEngine_ClearsTheRecordOfALaneWhoseNextMessageIsNotSent(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{lease: 3 * time.Second}, 0)
	d.taskTime, d.answer = 10*time.Millisecond, func(*entry) error { return nil }
	d.add(0, 3, "A", "")
	l, suspect := d.lanes[0], d.row(0, "A", "")
	suspect.crashed = true
	l.crashes = isolatedFrom
	l.add([]*entry{suspect})
	announced, tasks := false, 0
	d.did = func(c *task) {
		if c.lane == l {
			tasks++
		}
	}
	d.run(time.Second, time.Millisecond, func() {
		if l.together && !announced {
			d.taskTime = 0 // what comes next is not recorded yet
		}
		if l.announced == suspect && !announced {
			announced, tasks, d.taskTime = true, 0, 10*time.Millisecond
			d.pause(pauses{lanes: [len(d.lanes)]bool{0: true}}, d.now)
		}
		d.checkTurns(t)
	})
	if !announced || tasks == 0 || l.stale {
		t.Errorf("it was about to be sent: %t; then %d writes for its lane; the record is left: %t", announced, tasks, l.stale)
	}
}
