package relay

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// limits are the sizes that an engine works with.
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
	reachable    func() bool                   // whether the sink reaches its broker; nil: it cannot tell
	mostSuspects int                           // kept in memory at most; 0: maxSuspects
	mostTopics   int                           // in trouble, kept in memory at most while the sink works; 0: maxTopics
	mostWaiting  int                           // entries of one key before reads pass it over; 0: maxWaiting
	sweepFrom    int                           // followers of one key before it is swept; 0: sweepFrom
	slowRead     time.Duration                 // a read that takes longer has busy keys swept; 0: slowRead
	aheadEvery   time.Duration                 // how often to look ahead; 0: aheadEvery
	aheadScan    int                           // rows of the table in one such look; 0: aheadScan
	aheadLook    int                           // rows of each lane to choose from; 0: aheadLook
	postponed    time.Duration                 // shortest wait of what failed at no charge; 0: postponeLeast
}

// engine decides what a worker does next: what to read, publish and delete. It
// does no I/O, knows no goroutine and is told the time, so that a test can drive
// it through any schedule. It belongs to the worker's loop.
//
// At most one read and one deletion are under way at a time.
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
	stale   bool          // what that read brings is of no use
	poll    time.Duration // present interval of polls
	pollAt  time.Time     // dry lanes are read again then
	breadth int           // doubted lanes in one read
	sound   bool          // the last read was of lanes that are not doubted
	slow    int           // reads in a row that passed busy keys over and took long
	reads   int           // that were answered
	readTo  int           // the lane that the last read ended with, if it left some out

	removals
}

// read is a read under way.
type read struct {
	outbox.ReadRequest
	ahead   *outbox.Ahead // nil: from the start of the lanes
	lanes   []*lane
	trusted []time.Time // of each: what the read was made under
	began   time.Time
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
	l.slowRead = cmp.Or(l.slowRead, slowRead)
	l.aheadEvery = cmp.Or(l.aheadEvery, aheadEvery)
	l.aheadScan = cmp.Or(l.aheadScan, aheadScan)
	l.aheadLook = cmp.Or(l.aheadLook, aheadLook)
	return &engine{limits: l, poll: l.pollMin, breadth: outbox.Lanes, removals: newRemovals(l.draw, l.removeRows), circuits: circuits{inOrder: l.order == OrderPerKeyPipelined, enough: l.window, jitter: l.draw}}
}

// hold begins to work a lane; see mayHold.
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

// trust extends the time that a lane's lease may be relied on.
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

// mayHold reports that a lane can be worked: it is not held, and nothing is left
// of an earlier time that its rows could be confused with.
func (e *engine) mayHold(number int) bool {
	if e.lanes[number] != nil {
		return false
	}
	e.leaving = slices.DeleteFunc(e.leaving, e.idle)
	return !slices.ContainsFunc(e.leaving, func(l *lane) bool { return l.number == number })
}

// drain stops a lane from taking anything new. Once it is idle it can be
// dropped and its lease given back.
func (e *engine) drain(number int) {
	if l := e.lanes[number]; l != nil {
		l.draining = true
		if m := l.announced; m != nil {
			l.cancel()
			e.unrelated(m)
		}
	}
}

// idle reports that nothing of a lane is in flight or waits for its deletion, so
// that letting it go repeats nothing.
func (e *engine) idle(l *lane) bool {
	return l.inFlight == 0 && !l.reading && !e.hasChores(l) && !e.owes(l)
}

// drop ends the work on a lane. What is in flight still gets its outcome, and
// what is confirmed is still deleted: that is right whoever holds the lease.
func (e *engine) drop(number int) {
	if l := e.lanes[number]; l != nil {
		e.lanes[number] = nil
		l.draining, l.failing, l.followers = true, nil, nil
		e.leaving = append(e.leaving, l)
		e.purge(func(m *entry) bool { return m.lane == l })
	}
}

// wake makes every lane worth a read: something was committed, or the poll is
// due.
func (e *engine) wake() {
	e.woken = e.reading
	for _, l := range e.lanes {
		if l != nil {
			l.dry = false
		}
	}
}

// nextRead returns the read that is due, or nil. Lanes that have enough to do,
// that are full, or that wait after a failure are left out, and so are for a moment
// those that know nothing but many rows about to be deleted, which the read would
// have to pass over. Rows that another transaction has locked fill no lane. Nothing is
// read while too many confirmed rows cannot be deleted: what
// may be repeated after a crash must not grow without bound.
func (e *engine) nextRead(now time.Time) *read {
	if e.reading || e.undeleted() >= maxUndeleted {
		return nil
	}
	if r := e.lookAhead(now); r != nil {
		return r
	}
	polled := !now.Before(e.pollAt)
	if polled {
		e.wake()
		e.pollAt = now.Add(e.poll)
	}
	wanting, starving, held := e.wanting(now)
	if len(wanting) == 0 {
		if polled {
			e.poll = min(2*e.poll, e.pollMax)
		}
		return nil
	}
	if !starving && len(wanting) < held/2 {
		return nil // more of them soon: a read for a few costs as much as for many
	}
	wanting = e.narrow(wanting)
	r := &read{ReadRequest: outbox.ReadRequest{Rows: e.laneRows, Bytes: e.laneBytes, Hollow: e.hollowTopics(now)}, lanes: wanting, began: now}
	for _, l := range wanting {
		l.reading, l.unbusied, l.readBegan = true, false, now
		r.Lanes, r.trusted = append(r.Lanes, l.number), append(r.trusted, l.trusted)
		r.Busy = l.busy(r.Busy)
		r.Known = l.appendKnown(r.Known)
	}
	e.reading = true
	return r
}

// appendKnown appends what reads of a lane are to pass over.
func (l *lane) appendKnown(known []outbox.Known) []outbox.Known {
	for _, m := range l.entries {
		known = append(known, outbox.Known{ID: m.ID, CreatedAt: m.CreatedAt})
	}
	return known
}

// putOffReads puts off the next read of a lane whose read has failed alone, after so
// many reads that had an answer. If others have one meanwhile, the lane is to blame, a
// message too large for the way to the database perhaps, and is tried more and more
// rarely.
func (l *lane) putOffReads(now time.Time, reads int) {
	if reads > l.unreadableAt {
		l.unreadable, l.unreadableAt = l.unreadable+1, reads
	}
	l.readAt = now.Add(min(readAgain<<min(l.unreadable, 8), readRarely))
}

// narrow leaves lanes out of a read. Those whose last read has failed are read apart
// from the others, in turn with them, and fewer at a time with each failure: the read
// may have been too much for the time that it has, or one of them cannot be read.
func (e *engine) narrow(lanes []*lane) []*lane {
	var doubted, sound []*lane
	for _, l := range lanes {
		if l.doubted {
			doubted = append(doubted, l)
		} else {
			sound = append(sound, l)
		}
	}
	e.sound = len(sound) > 0 && (len(doubted) == 0 || !e.sound)
	if e.sound {
		return sound
	}
	if len(doubted) <= e.breadth {
		return doubted
	}
	first, _ := slices.BinarySearchFunc(doubted, e.readTo+1, func(l *lane, n int) int { return l.number - n })
	chosen := slices.Concat(doubted[first:], doubted[:first])[:e.breadth]
	e.readTo = chosen[len(chosen)-1].number
	slices.SortFunc(chosen, func(a, b *lane) int { return a.number - b.number })
	return chosen
}

// maxEntries bounds a lane's memory, in reads.
const maxEntries = 8

// wanting returns the lanes that a read is worth it for, whether one of them has
// nothing left to publish, and how many lanes are held.
func (e *engine) wanting(now time.Time) (lanes []*lane, starving bool, held int) {
	for _, l := range e.lanes {
		if l == nil {
			continue
		}
		held++
		switch {
		case l.draining, l.dry, !l.loaded, now.After(l.trusted), now.Before(l.readAt),
			l.ready.len() > e.laneRows/2,
			l.bytes >= e.laneBytes && !e.relieve(l), len(l.failing) >= e.laneRows, len(l.entries)-l.locked >= maxEntries*e.laneRows,
			len(l.entries) >= e.laneRows/2 && len(e.topics) == 0 && l.settled() && now.Sub(l.readBegan) < readAgain:
			continue
		}
		lanes = append(lanes, l)
		starving = starving || l.ready.len() == 0
	}
	return lanes, starving, held
}

// read takes what a read returned; entries of one lane come together, in order. What
// comes later than the lease was good for under which it was asked for counts for
// nothing: another server may hold the lease by now.
func (e *engine) read(r *read, entries []*entry, now time.Time, err error) {
	e.reading = false
	woken, inTime := e.woken, err == nil && !e.stale
	e.woken, e.stale = false, false
	found := 0
	for i, l := range r.lanes {
		useful := inTime && !now.After(r.trusted[i]) && !l.refetched
		l.refetched = false
		n := 0
		for n < len(entries) && entries[n].Lane == l.number {
			n++
		}
		mine := entries[:n]
		entries = entries[n:]
		for _, m := range mine {
			m.ahead = r.ahead != nil
		}
		if useful && !l.draining { // a dropped lane is draining too
			found += l.add(mine)
		}
		l.reading = false
		if r.ahead != nil {
			continue
		}
		bytes := 0
		for _, m := range mine {
			bytes += m.size()
		}
		whole := useful && len(mine) < r.Rows && bytes < r.Bytes
		l.dry = whole && !woken && !l.unbusied
		if l.dry {
			l.beyond = 0
		}
		if whole {
			l.behind = time.Time{}
		}
	}
	if err != nil && (r.ahead == nil || !sqlerr.TimedOut(err)) { // that is an answer
		e.forgetUnsent()
	}
	if r.ahead != nil {
		e.lookedAhead(r, found, now, err)
		return
	}
	if err != nil {
		e.breadth = max(1, min(e.breadth, len(r.lanes))/4)
		for _, l := range r.lanes {
			l.doubted = true
		}
		if len(r.lanes) == 1 {
			r.lanes[0].putOffReads(now, e.reads)
		}
	} else {
		e.reads++
		for _, l := range r.lanes {
			l.unreadable, l.unreadableAt, l.doubted = 0, e.reads, false
		}
		if !slices.ContainsFunc(e.lanes[:], func(l *lane) bool { return l != nil && l.doubted }) {
			e.breadth = outbox.Lanes
		}
	}
	if len(r.Busy) > 0 && now.Sub(r.began) > e.slowRead && e.order == OrderPerKey {
		e.slow++
	} else {
		e.slow = 0
	}
	if e.slow >= slowReads {
		e.slow = 0
		for _, l := range r.lanes {
			if e.live(l) && l.loaded && !l.draining {
				l.stopBusy()
			}
		}
	}
	// Polls follow one another fast while they find something, then slower.
	if found > 0 {
		e.poll = e.pollMin
	} else {
		e.poll = min(2*e.poll, e.pollMax)
	}
	e.pollAt = now.Add(e.poll)
}

// readAgain is how long a lane is left out whose read has failed alone, or that knows
// nothing but rows about to be deleted.
const readAgain = time.Second

// readRarely is how long a lane is left out at most.
const readRarely = time.Minute

// forgetUnsent makes all lanes forget what was not sent. A read under way passes
// over some of that, so what it brings may lie behind it: it counts for nothing.
func (e *engine) forgetUnsent() {
	e.stale = e.reading
	for _, l := range e.lanes {
		if l != nil {
			l.forgetUnsent()
		}
	}
	e.purge(func(m *entry) bool { return m.lane.entries[m.rowID()] != m })
}

// nextPublish returns messages of one lane to publish, in order, whose outcomes
// are due at deadline, or nothing. A lane publishes only while its lease can be
// trusted for a while yet: the deadline is reached only if the lease is renewed.
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

// take returns up to most publishable entries of a lane. One that has to go out
// alone is announced first, and returned once that is written down.
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
		m.state = inFlight // so that it is not taken twice
		taken = append(taken, m)
	}
	return taken
}

// due returns the time at which something is to be done even if nothing happens
// before.
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
	// What is due and was not done just now waits for something else as well.
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
