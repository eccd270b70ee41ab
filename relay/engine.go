package relay

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// limits are the sizes and limits of an engine.
type limits struct {
	window       int           // messages in flight, over all lanes
	laneRows     int           // rows of one lane in one read
	laneBytes    int           // bytes of one lane in one read; in memory a lane takes twice that, and once more of parked
	removeRows   int           // rows in one deletion
	linger       time.Duration // a confirmed row waits so long for others to be deleted with
	reserve      time.Duration // a lane publishes while its lease can be trusted for so long
	pollMin      time.Duration
	pollMax      time.Duration
	order        Order
	attempts     Retry
	unroutable   func(topic string) Unroutable // nil: refuse
	owner        string                        // the worker's
	draw         draw                          // nil: at random
	reachable    func() bool                   // whether the sink reaches its broker; nil: it cannot report it
	mostSuspects int                           // kept in memory at most; 0: maxSuspects
	mostTopics   int                           // in trouble, kept in memory at most while the sink works; 0: maxTopics
	mostWaiting  int                           // entries of one key before reads pass it over; 0: maxWaiting
	sweepFrom    int                           // followers of one key before it is swept; 0: sweepFrom
	quickRead    time.Duration                 // after a read that takes no longer the next one may bring twice as much; 0: quickRead
	slowRead     time.Duration                 // a read that takes longer has busy keys swept; 0: slowRead
	aheadEvery   time.Duration                 // how often to look ahead; 0: aheadEvery
	aheadScan    int                           // rows of the table in one such look; 0: aheadScan
	aheadLook    int                           // rows of each lane to choose from; 0: aheadLook
	postponed    time.Duration                 // shortest wait of what failed at no charge; 0: postponeLeast
}

// engine decides what a worker does next: what to read, publish and delete. It does no
// I/O, starts no goroutine and gets the time as an argument, so that a test can drive
// it through any schedule. It belongs to the worker's loop.
//
// At most one read and one deletion run at a time.
type engine struct {
	limits
	lanes    [outbox.Lanes]*lane
	leaving  []*lane // dropped, with something in flight or to be deleted
	inFlight int
	sent     uint64 // publishes so far
	terms    uint64 // of pipelines, so far
	rotation int    // the lane to begin the next round of publishing with
	circuits
	chores
	solo
	ahead

	reading bool
	woken   bool          // something was committed while that read ran
	stale   bool          // the result of that read is useless
	poll    time.Duration // current poll interval
	pollAt  time.Time     // dry lanes are read again then
	breadth int           // doubted lanes in one read
	sound   bool          // the last read was of lanes that are not doubted
	slow    int           // reads in a row that passed busy keys over and took long

	unhindered unhindered
	reads      int  // reads answered
	carries    pace // rows that a read may bring, of all lanes
	readTo     int  // the lane that the last read ended with, if it left some out

	removals
}

func newEngine(l limits) *engine {
	if l.draw == nil {
		l.draw = rand.N
	}
	l.mostSuspects = cmp.Or(l.mostSuspects, maxSuspects)
	l.mostTopics = cmp.Or(l.mostTopics, maxTopics)
	l.postponed = cmp.Or(l.postponed, postponeLeast)
	l.mostWaiting = cmp.Or(l.mostWaiting, maxWaiting)
	l.sweepFrom = cmp.Or(l.sweepFrom, sweepFrom)
	l.quickRead = cmp.Or(l.quickRead, quickRead)
	l.slowRead = cmp.Or(l.slowRead, slowRead)
	l.aheadEvery = cmp.Or(l.aheadEvery, aheadEvery)
	l.aheadScan = cmp.Or(l.aheadScan, aheadScan)
	l.aheadLook = cmp.Or(l.aheadLook, aheadLook)
	return &engine{limits: l, poll: l.pollMin, breadth: outbox.Lanes, carries: pace{size: carriesFirst, least: outbox.Lanes, most: outbox.Lanes * l.laneRows}, chores: chores{dueBytes: pace{size: firstDueBytes, least: leastDueBytes, most: mostDueBytes}}, removals: newRemovals(l.draw, l.removeRows), circuits: circuits{inOrder: l.order == OrderPerKeyPipelined, enough: l.window, jitter: l.draw}}
}

// hold starts the work on a lane; see mayHold.
func (e *engine) hold(number int, t taken, trusted time.Time) {
	l := newLane(number, t.epoch, &e.limits, trusted)
	l.crashes, l.suspect = t.crashes, t.suspect
	l.retry = drawnBackOff(e.draw)
	if e.inOrder {
		e.terms++
		l.term = e.terms
	}
	e.lanes[number] = l
	for _, m := range slices.Concat(e.locked, e.removing, e.confirmed) { // not to be sent again
		if m.Lane == number {
			l.know(m)
		}
	}
}

// trust extends the time for which a lane's lease may be relied on.
func (e *engine) trust(number int, epoch int64, until time.Time) {
	l := e.lanes[number]
	if l == nil || l.epoch != epoch {
		return
	}
	if l.overlooked {
		l.overlooked = false
		e.parkedDue(l.trusted) // that is past
	}
	l.trusted = until
}

// mayHold reports whether a lane can be worked: it is not held, and nothing of an
// earlier lease is left that could be confused with its rows.
func (e *engine) mayHold(number int) bool {
	if e.lanes[number] != nil {
		return false
	}
	e.leaving = slices.DeleteFunc(e.leaving, e.idle)
	return !slices.ContainsFunc(e.leaving, func(l *lane) bool { return l.number == number })
}

// drain stops a lane from taking anything new. Once idle, it can be dropped and its
// lease given back.
func (e *engine) drain(number int) {
	if l := e.lanes[number]; l != nil {
		l.draining = true
		if m := l.announced; m != nil {
			l.cancel()
			e.unrelated(m)
		}
	}
}

// idle reports whether nothing of a lane is in flight or waits for deletion, so that
// giving it up repeats nothing.
func (e *engine) idle(l *lane) bool {
	return l.inFlight == 0 && !l.reading && !e.hasChores(l) && !e.owes(l)
}

// drop ends the work on a lane. Messages in flight still get their outcome, and
// confirmed ones are still deleted: that is right whoever holds the lease.
func (e *engine) drop(number int) {
	if l := e.lanes[number]; l != nil {
		e.lanes[number] = nil
		l.draining, l.failing, l.followers = true, nil, nil
		e.leaving = append(e.leaving, l)
		e.purge(func(m *entry) bool { return m.lane == l })
	}
}

// wake makes every lane worth a read: something was committed, or the poll is due.
func (e *engine) wake() {
	e.woken = e.reading
	for _, l := range e.lanes {
		if l != nil {
			l.dry = false
		}
	}
}

// forgetUnsent makes all lanes forget what was not sent. A running read passes over
// some of that, and its rows may lie behind it, so its result is ignored.
func (e *engine) forgetUnsent() {
	e.stale = e.reading
	for _, l := range e.lanes {
		if l != nil {
			l.forgetUnsent()
		}
	}
	e.purge(func(m *entry) bool { return m.lane.entries[m.rowID()] != m })
}

// nextPublish returns messages of one lane to publish, in order, with their outcomes
// due at deadline, or nothing. A lane publishes only while its lease can be trusted for
// some time: the deadline is reached only if the lease is renewed.
func (e *engine) nextPublish(now, deadline time.Time) []*entry {
	free := e.window - e.inFlight
	if e.room > 0 && e.room < e.window {
		free = e.room - e.inFlight
	}
	if free <= 0 {
		return nil
	}
	e.refetch()
	e.passTurn()
	if len(e.topics) > 0 {
		e.abandon(now)
		if m := e.nextProbe(now); m != nil {
			return e.send([]*entry{m}, deadline)
		}
		e.release(now, func(m *entry) { m.lane.push(m) })
	}
	for range e.lanes {
		l := e.lanes[e.rotation]
		e.rotation = (e.rotation + 1) % len(e.lanes)
		if l == nil || !e.mayPublish(l, now) {
			continue
		}
		if taken := e.take(l, free); len(taken) > 0 {
			return e.send(taken, deadline)
		}
	}
	return nil
}

func (e *engine) send(taken []*entry, deadline time.Time) []*entry {
	for _, m := range taken {
		e.sent++
		m.state, m.deadline, m.sent = inFlight, deadline, e.sent
		m.Term = m.lane.term
	}
	e.inFlight += len(taken)
	taken[0].lane.inFlight += len(taken)
	return taken
}

func (e *engine) mayPublish(l *lane, now time.Time) bool {
	return l.loaded && !l.draining && !now.Add(e.reserve).After(l.trusted) && !now.Before(l.retryAt) &&
		l.alone == nil && !l.accused && !l.restarting
}

// take returns up to most publishable entries of a lane. An entry that has to go out
// alone is announced first, and returned once the announcement is recorded.
func (e *engine) take(l *lane, most int) []*entry {
	if m := l.announced; m != nil {
		if !l.written || l.inFlight > 0 {
			return nil
		}
		l.announced, l.written, l.alone = nil, false, m
		return []*entry{m}
	}
	if e.sinkDown || l.careful() && l.proven(e.window) {
		return nil
	}
	var taken []*entry
	for len(taken) < most {
		m := l.ready.next()
		if m == nil {
			break
		}
		solo := m.goesAlone()
		if solo && (len(taken) > 0 || l.inFlight > 0 || !e.hasTurn(m)) {
			break
		}
		if !e.admits(m) {
			if e.inOrder {
				break
			}
			l.ready.drop()
			e.withhold(m)
			continue
		}
		if m.hollow {
			l.refetch = true
			break
		}
		l.ready.drop()
		if solo {
			e.announce(m)
			break
		}
		m.state = inFlight // prevents taking it twice
		taken = append(taken, m)
	}
	return taken
}

// due returns the time at which something is to be done even without an event.
func (e *engine) due(now time.Time) time.Time {
	due := now.Add(e.pollMax)
	earlier := func(t time.Time) {
		if t.Before(due) {
			due = t
		}
	}
	if !e.reading && e.undeleted() < maxUndeleted {
		earlier(e.pollAt)
	}
	for _, l := range e.lanes {
		if l != nil && l.retryAt.After(now) {
			earlier(l.retryAt)
		}
	}
	// If it is due and was not done just now, it also waits for something else.
	for _, at := range []time.Time{e.circuits.due(), e.choresDue(), e.removalDue(now)} {
		switch {
		case at.IsZero():
		case at.After(now):
			earlier(at)
		default:
			earlier(now.Add(e.pollMin))
		}
	}
	return due
}
