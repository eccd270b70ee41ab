package relay

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// limits are the sizes and limits of an engine.
type limits struct {
	window         int           // messages in flight, over all lanes
	laneWindow     int           // of one lane; 0: window
	laneRows       int           // rows of one lane in one read
	laneBytes      int           // bytes of one lane in one read; in memory a lane takes twice that, once more of large messages in flight, and of retrying messages
	removeRows     int           // rows in one deletion
	linger         time.Duration // a confirmed row waits so long for others to be deleted with
	lease          time.Duration // isolated lanes all have their turn in about this time; 0: turns end by messages alone
	reserve        time.Duration // a lane publishes while its lease can be trusted for so long
	pollMin        time.Duration
	pollMax        time.Duration
	order          Order
	attempts       Retry
	dropUnroutable func(topic string) bool   // nil: refuse
	owner          string                    // the worker's
	draw           draw                      // nil: at random
	reachable      func() bool               // whether the sink reaches its broker; nil: it cannot report it
	mostUnclear    int                       // kept in memory at most; 0: maxUnclear
	mostTopics     int                       // in trouble, kept in memory at most while the sink works; 0: maxTopics
	mostWaiting    int                       // entries of one key before reads pass it over; 0: maxWaiting
	sweepFrom      int                       // followers of one key before it is swept; 0: sweepFrom
	quickRead      time.Duration             // after a read that takes no longer the next one may bring twice as much; 0: quickRead
	slowRead       time.Duration             // a read that takes longer has busy keys swept; 0: slowRead
	aheadEvery     time.Duration             // how often to look ahead; 0: aheadEvery
	aheadScan      int                       // rows of the table in one such look; 0: aheadScan
	aheadLook      int                       // rows of each lane to choose from; 0: aheadLook
	awaitPauses    bool                      // publish nothing before the first call of pause
	sinkOf         func(topic string) string // the name of a topic's sink; nil: there is one
	postponed      time.Duration             // shortest wait of what failed without using up an attempt; 0: postponeLeast
}

// engine decides what a worker does next: what to read, publish and delete. It does no
// I/O, leaves no goroutine and gets the time as an argument, so that a test can drive
// it through any schedule. It belongs to the worker's loop.
//
// At most one read, one deletion and one task run at a time.
//
// Where a message goes:
//
//	reads.go, ahead.go   choose the lanes to read; reader.go reads them, pieces.go what is large
//	lane.go, chain.go    the message becomes ready (fifo.go), or waits behind its key
//	publish.go           takes it, if its lane and the window have room
//	circuit.go, probe.go withhold it while its topic is unavailable; trouble.go, stuck.go
//	                     bound the memory that takes
//	pauses.go            withholds it while an operator has paused its topic, sink or key
//	isolation.go         sends it in its lane's turn, or alone, if the lane's workers have died
//	loop.go              hands it to the sink, and its outcome back
//	outcomes.go          confirmed: removal.go deletes it
//	                     unavailable, unclear: back to its circuit or its lane
//	                     refused: failure.go counts the attempt
//	record.go            moves it to the tables parked or dead_letters, with its successors
//	                     behind it (retrying.go, sweep.go), as a task (tasks.go, taskrunner.go)
//	due.go, due_rows.go  bring it back when it is due
//	commands.go          replay or discard a dead letter
//	load.go              learns the retrying keys of a lane that was just taken
type engine struct {
	limits  limits
	lanes   [outbox.Lanes]*lane
	leaving []*lane // dropped, with something in flight or to be deleted

	reads      reads      // what to read next
	ahead      ahead      // reading past messages that wait
	publishing publishing // what is handed to the sink
	circuits   circuits   // which topics may be published, and who probes
	paused     paused     // what operators have paused
	isolation  isolation  // which lane has the turn to send, after crashes
	removals   removals   // confirmed messages, to be deleted
	tasks      tasks      // reads and writes of retrying messages and dead letters
	due        due        // when to look for retrying messages that are due
	budget     budget     // how many retrying messages may fail again

	backAt time.Time // when the database was last found to be back
}

func newEngine(l limits) *engine {
	if l.draw == nil {
		l.draw = rand.N
	}
	l.laneWindow = cmp.Or(l.laneWindow, l.window)
	l.mostUnclear = cmp.Or(l.mostUnclear, maxUnclear)
	l.mostTopics = cmp.Or(l.mostTopics, maxTopics)
	l.postponed = cmp.Or(l.postponed, postponeLeast)
	l.mostWaiting = cmp.Or(l.mostWaiting, maxWaiting)
	l.sweepFrom = cmp.Or(l.sweepFrom, sweepFrom)
	l.quickRead = cmp.Or(l.quickRead, quickRead)
	l.slowRead = cmp.Or(l.slowRead, slowRead)
	l.aheadEvery = cmp.Or(l.aheadEvery, aheadEvery)
	l.aheadScan = cmp.Or(l.aheadScan, aheadScan)
	l.aheadLook = cmp.Or(l.aheadLook, aheadLook)
	return &engine{
		limits: l,
		reads: reads{
			poll: l.pollMin, breadth: outbox.Lanes,
			rows: pace{size: firstReadRows, least: outbox.Lanes, most: outbox.Lanes * l.laneRows},
		},
		circuits: circuits{
			inOrder: l.order == OrderPerKeyPipelined, enough: l.window, jitter: l.draw,
			mostTopics: l.mostTopics, mostUnclear: l.mostUnclear, reachable: l.reachable,
		},
		removals: newRemovals(l),
		paused:   paused{unknown: l.awaitPauses, sinkOf: l.sinkOf},
		due:      due{bytes: pace{size: firstDueBytes, least: leastDueBytes, most: mostDueBytes}},
	}
}

// hold starts the work on a lane; see mayHold.
func (e *engine) hold(number int, t relaystore.Taken, trusted time.Time) {
	l := newLane(number, t.Epoch, &e.limits, trusted)
	l.crashes, l.leftAlone, l.inheritedUntil = t.Crashes, t.Alone, t.UnsureUntil
	if t.Alone == relaystore.WholeLane { // nothing to blame, but it must not count again
		l.leftAlone, l.stale, l.mustClear = 0, true, true
	}
	l.retry = drawnBackOff(e.limits.draw)
	l.paused = e.paused.now.lanes[number]
	if e.circuits.inOrder {
		e.publishing.terms++
		l.term = e.publishing.terms
	}
	e.lanes[number] = l
	gone := func(m *entry) bool { return m.state != stateConfirmed } // deleted; it may have been moved before
	retried := slices.DeleteFunc(slices.Clone(e.tasks.retried), gone)
	for _, m := range slices.Concat(e.removals.locked, e.removals.removing, e.removals.confirmed, retried) { // not to be sent again
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
		e.due.lookFromStart(l.trusted) // that is past
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
	if l := e.lanes[number]; l != nil && !l.draining {
		l.draining, l.putOff = true, false
		if m := l.announced; m != nil {
			l.cancel()
			e.circuits.unrelated(m)
		}
	}
}

// idle reports whether nothing of a lane is in flight or waits for deletion, so that
// giving it up repeats nothing.
func (e *engine) idle(l *lane) bool {
	return l.inFlight == 0 && !l.reading && !e.hasTasks(l) && !e.removals.owes(l)
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
	e.reads.woken = e.reads.running
	for _, l := range e.lanes {
		if l != nil {
			l.dry = false
		}
	}
}

// forgetUnsent makes all lanes forget what was not sent. A running read passes over
// some of that, and its rows may lie behind it, so its result is ignored.
func (e *engine) forgetUnsent() {
	e.reads.stale = e.reads.running
	for _, l := range e.lanes {
		if l != nil {
			l.forgetUnsent()
		}
	}
	e.purge(func(m *entry) bool { return m.lane.entries[m.rowID()] != m })
}

// databaseBack ends the pauses after failures: the database answers heartbeats again. Not those of a
// lane that could not be read while others were: reading it may be what stopped the database.
func (e *engine) databaseBack(now time.Time) {
	e.backAt = now
	e.reads.absolve(e.lanes[:])
	pauses := []*time.Time{&e.reads.retryAt, &e.removals.retryAt, &e.tasks.retryAt, &e.tasks.loadAt, &e.tasks.retriedAt, &e.tasks.crashesAt, &e.due.at}
	for _, l := range e.lanes {
		if l != nil {
			pauses = append(pauses, &l.taskAt)
			if l.unreadable <= 1 {
				pauses = append(pauses, &l.readAt)
			}
		}
	}
	for _, until := range pauses {
		if until.After(now) {
			*until = now
		}
	}
}

// againAt returns when to try again a call that failed. Of one that began before the database was
// back nothing follows: it hung over the end of the outage.
func (e *engine) againAt(now, began time.Time, retryIn time.Duration) time.Time {
	if began.Before(e.backAt) {
		return now
	}
	return now.Add(retryIn)
}

// wakeAt returns the time at which something is to be done even without an event.
func (e *engine) wakeAt(now time.Time) time.Time {
	due := now.Add(e.limits.pollMax)
	earlier := func(t time.Time) {
		if t.Before(due) {
			due = t
		}
	}
	if !e.reads.running && !now.Before(e.reads.retryAt) && e.removals.undeleted() < maxUndeleted {
		earlier(e.reads.pollAt)
	}
	for _, l := range e.lanes {
		if l != nil && l.retryAt.After(now) {
			earlier(l.retryAt)
		}
	}
	for _, at := range []time.Time{e.reads.retryAt, e.ahead.until, e.overlapAt(), e.trickleAt()} {
		if at.After(now) {
			earlier(at)
		}
	}
	// If it is due and was not done just now, it also waits for something else.
	for _, at := range []time.Time{e.circuits.wakeAt(), e.tasksDue(), e.removals.wakeAt()} {
		switch {
		case at.IsZero():
		case at.After(now):
			earlier(at)
		default:
			earlier(now.Add(e.limits.pollMin))
		}
	}
	return due
}
