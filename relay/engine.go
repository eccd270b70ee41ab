package relay

import (
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/contain"
	"github.com/oncemill/oncemill/outbox"
)

// limits are the sizes that an engine works with.
type limits struct {
	window     int           // messages in flight, over all lanes
	laneRows   int           // rows of one lane in one read
	laneBytes  int           // bytes of one lane in one read; in memory a lane takes twice that, and once more of parked
	removeRows int           // rows in one deletion
	linger     time.Duration // a confirmed row waits so long for others to be deleted with
	pollMin    time.Duration
	pollMax    time.Duration
	order      Order
	attempts   Retry
	unroutable func(topic string) Unroutable // nil: refuse
	owner      string                        // the worker's
	draw       draw                          // nil: at random
	reachable  func() bool                   // whether the sink reaches its broker; nil: it cannot tell
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

	reading bool
	woken   bool          // something was committed while that read ran
	stale   bool          // what that read brings is of no use
	poll    time.Duration // present interval of polls
	pollAt  time.Time     // dry lanes are read again then

	confirmed    []*entry  // not yet handed to a deletion; their lanes may be lost by now
	since        time.Time // the oldest of confirmed
	removing     []*entry  // the deletion under way, or the one to be tried again
	removeActive bool
	removeFailed bool
	removeAt     time.Time // a failed deletion is tried again then
}

// read is a read under way.
type read struct {
	outbox.ReadRequest
	lanes []*lane
}

func newEngine(l limits) *engine {
	if l.draw == nil {
		l.draw = rand.N
	}
	return &engine{limits: l, poll: l.pollMin, circuits: circuits{inOrder: l.order == OrderPerKeyPipelined, enough: l.window, jitter: l.draw}}
}

// hold begins to work a lane; see mayHold.
func (e *engine) hold(number int, t taken, trusted time.Time) {
	l := newLane(number, t.epoch, e.order, trusted)
	l.crashes, l.suspect = t.crashes, t.suspect
	if e.inOrder {
		l.retry = drawnBackOff(e.draw)
		e.terms++
		l.term = e.terms
	}
	e.lanes[number] = l
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
	if l.inFlight > 0 || l.reading || e.hasChores(l) {
		return false
	}
	of := func(m *entry) bool { return m.lane == l }
	return !slices.ContainsFunc(e.removing, of) && !slices.ContainsFunc(e.confirmed, of)
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
// that are full, or that wait after a failure are left out, and so are those that
// know nothing but many rows about to be deleted, which the read would have to
// pass over. Nothing is read while a deletion has failed: what may be repeated after
// a crash must not grow.
func (e *engine) nextRead(now time.Time) *read {
	if e.reading || e.removeFailed {
		return nil
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
	r := &read{ReadRequest: outbox.ReadRequest{Rows: e.laneRows, Bytes: e.laneBytes}, lanes: wanting}
	for _, l := range wanting {
		l.reading, l.unbusied = true, false
		r.Lanes = append(r.Lanes, l.number)
		r.Busy = l.busy(r.Busy)
		for id := range l.entries {
			r.Known = append(r.Known, id)
		}
	}
	e.reading = true
	return r
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
		case l.draining, l.dry, !l.loaded, now.After(l.trusted),
			l.ready.len() > e.laneRows/2,
			l.bytes >= e.laneBytes, len(l.entries) >= maxEntries*e.laneRows,
			len(l.entries) >= e.laneRows/2 && len(e.topics) == 0 && l.settled():
			continue
		}
		lanes = append(lanes, l)
		starving = starving || l.ready.len() == 0
	}
	return lanes, starving, held
}

// read takes what a read returned; entries of one lane come together, in order.
func (e *engine) read(r *read, entries []*entry, now time.Time, err error) {
	e.reading = false
	woken, useful := e.woken, err == nil && !e.stale
	e.woken, e.stale = false, false
	found := 0
	for _, l := range r.lanes {
		n := 0
		for n < len(entries) && entries[n].Lane == l.number {
			n++
		}
		mine := entries[:n]
		entries = entries[n:]
		if useful && !l.draining { // a dropped lane is draining too
			found += l.add(mine)
		}
		l.reading = false
		bytes := 0
		for _, m := range mine {
			bytes += m.size()
		}
		l.dry = useful && !woken && !l.unbusied && len(mine) < r.Rows && bytes < r.Bytes
		if l.dry {
			l.beyond = 0
		}
	}
	if err != nil {
		e.forgetUnsent()
	}
	// Polls follow one another fast while they find something, then slower.
	if found > 0 {
		e.poll = e.pollMin
	} else {
		e.poll = min(2*e.poll, e.pollMax)
	}
	e.pollAt = now.Add(e.poll)
}

// forgetUnsent makes all lanes forget what was not sent. A read under way passes
// over some of that, so what it brings may lie behind it: it counts for nothing.
func (e *engine) forgetUnsent() {
	e.stale = e.reading
	for _, l := range e.lanes {
		if l != nil {
			l.forgetUnsent()
		}
	}
	e.purge(func(m *entry) bool { return m.lane.entries[m.ID] != m })
}

// nextPublish returns messages of one lane to publish, in order, whose outcomes
// are due at deadline, or nothing. A lane publishes nothing that it cannot
// finish while its lease is trusted.
func (e *engine) nextPublish(now, deadline time.Time) []*entry {
	free := e.window - e.inFlight
	if e.room > 0 && e.room < e.window {
		free = e.room - e.inFlight
	}
	if free <= 0 {
		return nil
	}
	e.passTurn()
	if len(e.topics) > 0 {
		e.abandon(now)
		if m := e.nextProbe(now, deadline); m != nil {
			return e.send([]*entry{m}, deadline)
		}
		e.release(now, func(m *entry) { m.lane.push(m) })
	}
	for range e.lanes {
		l := e.lanes[e.rotation]
		e.rotation = (e.rotation + 1) % len(e.lanes)
		if l == nil || !l.mayPublish(now, deadline) {
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

func (l *lane) mayPublish(now, deadline time.Time) bool {
	return l.loaded && !l.draining && !deadline.After(l.trusted) && !now.Before(l.retryAt) &&
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

// outcome takes the sink's word on an entry.
func (e *engine) outcome(m *entry, now time.Time, err error) {
	if m.state != inFlight {
		return // a second outcome for one message: the first one counted
	}
	l := m.lane
	e.inFlight--
	l.inFlight--
	if l.alone == m {
		l.alone, l.stale = nil, true
	}
	kind := classify(err)
	if kind == unroutableOutcome && e.drops(m.Topic) {
		kind = confirmedOutcome
	}
	lost := e.lanes[l.number] != l
	switch kind {
	case confirmedOutcome:
		e.confirm(m, now)
	case unavailableOutcome:
		e.unavailable(m, e.sent, now, err)
		if !lost {
			e.putBack(m)
		}
	case refusedOutcome:
		e.unrelated(m)
		if !lost {
			e.charge(m, now, m.class(), err.Error())
		}
	case unroutableOutcome, unknownOutcome:
		e.doubt(m, now, err, lost)
	}
	if l.restart(now) {
		e.terms++
		l.term = e.terms
	}
}

// drops asks Config.Unroutable. Whoever panics there has refused.
func (e *engine) drops(topic string) (drop bool) {
	_ = contain.Call(func() error {
		drop = e.unroutable != nil && e.unroutable(topic) == Drop
		return nil
	})
	return drop
}

// confirm settles a message that the broker has.
func (e *engine) confirm(m *entry, now time.Time) {
	l := m.lane
	if l.retry != nil {
		l.retry.Reset()
	}
	if m.failedAt > 0 && e.suspected != nil {
		e.suspected(m, nil)
	}
	if len(e.topics) > 0 || e.room > 0 {
		for _, guilty := range e.pass(m) {
			e.charge(guilty, now, guilty.failure.class, guilty.failure.text)
		}
		if e.room >= e.window {
			e.room = 0
		}
	}
	l.confirm(m)
	if m.parked {
		e.settled = append(e.settled, m)
		return
	}
	if len(e.confirmed) == 0 {
		e.since = now
	}
	e.confirmed = append(e.confirmed, m)
}

// putBack keeps a message that found no way out.
func (e *engine) putBack(m *entry) {
	switch {
	case m.lane.draining:
		m.state = waiting
	case e.inOrder:
		m.state = again
		m.lane.repeat = append(m.lane.repeat, m)
		m.lane.restarting = true
	default:
		e.withhold(m)
	}
}

// doubt deals with an outcome that may be the message's fault or its topic's.
func (e *engine) doubt(m *entry, now time.Time, err error, lost bool) {
	class := classUnknown
	if errors.Is(err, ErrUnroutable) {
		class = classUnroutable
	}
	m.failure = &failure{class: class, text: err.Error()}
	switch {
	case lost || m.lane.draining:
		e.unrelated(m)
		m.state = waiting
	case e.unclear(m, e.sent, now, err):
		e.charge(m, now, class, err.Error())
	case e.inOrder || m.state == inFlight:
		e.putBack(m)
	}
}

// nextRemoval returns confirmed rows to delete, or nil. They gather for a
// moment, so that a deletion is worth its round trip.
func (e *engine) nextRemoval(now time.Time) []outbox.Ref {
	switch {
	case e.removeActive || now.Before(e.removeAt):
		return nil
	case len(e.removing) > 0: // failed; tried again alone
	case len(e.confirmed) == 0, !e.worthRemoving() && now.Sub(e.since) < e.linger:
		return nil
	default:
		n := min(len(e.confirmed), e.removeRows)
		e.removing = slices.Clone(e.confirmed[:n])
		e.confirmed = slices.Delete(e.confirmed, 0, n)
		e.since = now
	}
	e.removeActive = true
	refs := make([]outbox.Ref, len(e.removing))
	for i, m := range e.removing {
		refs[i] = m.ref()
	}
	return refs
}

// worthRemoving reports that waiting for more confirmed rows is not worth it:
// there are many, or quite some and none are about to join them.
func (e *engine) worthRemoving() bool {
	return len(e.confirmed) >= e.removeRows || e.inFlight == 0 && len(e.confirmed) >= e.laneRows
}

func (m *entry) ref() outbox.Ref {
	return outbox.Ref{Lane: m.Lane, ID: m.ID, MessageID: m.MessageID, CreatedAt: m.CreatedAt, Place: m.place}
}

// removed takes the answer to a deletion. One that failed, or whose answer was
// lost, is tried again alone: nothing confirmed is forgotten before it is gone.
func (e *engine) removed(now time.Time, retryIn time.Duration, err error) {
	e.removeActive = false
	if err != nil {
		e.removeFailed = true
		e.removeAt = now.Add(retryIn)
		e.forgetUnsent()
		return
	}
	e.removeFailed = false
	for _, m := range e.removing {
		m.lane.forget(m)
		m.lane.deleted++
		if !e.live(m.lane) || now.After(m.lane.trusted) {
			e.settled = append(e.settled, m) // another owner may have moved it
		}
	}
	e.removing = nil
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
	if !e.reading && !e.removeFailed {
		earlier(e.pollAt)
	}
	switch {
	case e.removeActive:
	case e.removeFailed:
		earlier(e.removeAt)
	case len(e.confirmed) > 0:
		earlier(e.since.Add(e.linger))
	}
	for _, l := range e.lanes {
		if l != nil && l.retryAt.After(now) {
			earlier(l.retryAt)
		}
	}
	// What is due and was not done just now waits for something else as well.
	for _, at := range []time.Time{e.circuits.due(), e.choresDue()} {
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
