package relay

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// chore is a database task other than reading the outbox and deleting confirmed rows.
// It concerns parked rows, dead letters or crashes. Chores are done one at a time, so
// each finds the tables as the previous one left them. A chore that collides with
// another transaction is retried at once. One that the database refuses or does not
// answer yields to others and is retried later. Doing it twice is harmless.
type chore struct {
	lane     *lane // whose lease it needs; nil: none
	failures []failure
	again    *time.Time       // when the next of its kind may begin, if it cannot be done; nil: its lane's
	undo     func(choreError) // nil: nothing to undo

	// do runs outside the loop, and may be left running there while the chore is
	// retried. So it passes its results to the loop through the function it returns
	// (nil: none). done follows that.
	do   func(choreContext) (found func(), err error)
	done func(now time.Time)
}

// choreAnswer is the answer to a chore.
type choreAnswer struct {
	found   func()
	err     error
	kind    choreError
	retryIn time.Duration
}

// choreError classifies the failure of a chore.
type choreError uint8

const (
	choreLost       choreError = iota // connection lost: the database may be another one afterwards
	choreCollided                     // with another transaction
	choreImpossible                   // this one; others may be possible
)

type choreContext struct {
	context.Context //nolint:containedctx // lives for one call
	store           parkingStore
	missed          func(rows int)                          // that the history could not keep
	bring           func(rows []*outboxstore.Row, s *space) // after the call: the payloads that rows lack; see pieces
	clock           func() time.Time
}

// chores is the engine's state of its chores.
type chores struct {
	settled     []*entry // confirmed rows of parked
	settleMost  int      // of them at a time
	chore       *chore   // running, or to be retried
	choreFailed bool
	choreAt     time.Time     // when a failed one is retried
	choreLane   int           // rotates
	sweepLane   int           // rotates
	choreTurn   int           // rotates over the kinds
	loadAt      time.Time     // after a failure
	settleAt    time.Time     // after a failure
	calmAt      time.Time     // after a failure
	dueAt       time.Time     // when to look for parked rows that are due; zero: nothing waits
	commandsAt  time.Time     // when to look for operators' commands
	beyondAt    time.Time     // when to look beyond the lanes' memory
	heads       int           // keys in the next look for what is due
	dueBytes    pace          // of payload and metadata in it
	dueInline   bool          // it skips large messages, which had their turn
	dueAfter    string        // the topic after which it begins; empty: with the first
	dueNext     time.Duration // until something is due of the topics looked at since the first; negative: nothing is
	dueAgain    bool          // something changed of those looked at since the first
	dueFound    bool          // something was due of them
	passedOver  []string      // topics that the last one passed over
	tokens      float64       // messages of parked that may fail
	tokensAt    time.Time     // when they were counted
}

const (
	maxFollowers  = 500
	commandsEvery = time.Second
	maxCommands   = 100
	maxSettled    = 500
	followLinger  = 50 * time.Millisecond
)

// choresDue returns when the next chore may begin; zero: not before an event.
func (e *engine) choresDue() (due time.Time) {
	earlier := func(at time.Time) {
		if due.IsZero() || at.Before(due) {
			due = at
		}
	}
	switch {
	case e.choreFailed:
		return e.choreAt
	case e.chore != nil:
		return time.Time{}
	}
	if !e.dueAt.IsZero() {
		earlier(e.dueAt)
	}
	earlier(e.commandsAt)
	if len(e.settled) > 0 {
		earlier(e.settleAt)
	}
	for _, l := range e.lanes {
		switch {
		case l == nil:
		case !l.loaded && !l.draining:
			earlier(e.loadAt)
		case len(l.failing) > 0, l.announced != nil && !l.written, l.accused:
			earlier(l.choreAt)
		case len(l.followers) > 0 && !l.draining:
			earlier(l.followAt)
		}
	}
	return due
}

func (e *engine) fence(l *lane) fence { return fence{lane: l.number, owner: e.owner, epoch: l.epoch} }

func (e *engine) live(l *lane) bool { return e.lanes[l.number] == l }

// hasChores reports whether a lane has something left to write.
func (e *engine) hasChores(l *lane) bool {
	return len(l.failing) > 0 || e.chore != nil && e.chore.lane == l ||
		slices.ContainsFunc(e.settled, func(m *entry) bool { return m.lane == l })
}

// nextChore returns the next database task, or nil.
func (e *engine) nextChore(now time.Time) *chore {
	if e.chore != nil && e.chore.lane != nil && e.choreFailed && !e.live(e.chore.lane) {
		e.chore, e.choreFailed = nil, false
	}
	switch {
	case e.choreFailed:
		if now.Before(e.choreAt) {
			return nil
		}
		e.choreFailed = false
	case e.chore != nil:
		return nil
	default:
		e.chore = e.pickChore(now)
	}
	return e.chore
}

// pickChore returns one chore that is due. The kinds take turns, so that none keeps the
// others waiting.
func (e *engine) pickChore(now time.Time) *chore {
	kinds := [...]func(time.Time) *chore{
		e.load, e.settle, e.writeOneLane, e.moveSwept, e.lookForDue, e.lookForCommands, e.lookBeyond, e.calm,
	}
	for range kinds {
		e.choreTurn = (e.choreTurn + 1) % len(kinds)
		if c := kinds[e.choreTurn](now); c != nil {
			return c
		}
	}
	return nil
}

// writeOneLane returns what a lane has to write; the lanes take turns.
func (e *engine) writeOneLane(now time.Time) *chore {
	for range e.lanes {
		e.choreLane = (e.choreLane + 1) % len(e.lanes)
		l := e.lanes[e.choreLane]
		if l == nil || !l.loaded && len(l.failing) == 0 || now.Before(l.choreAt) {
			continue
		}
		switch {
		case e.setAside(l):
			return e.writeFailures(l)
		case l.accused, l.announced != nil && !l.written:
			return e.writeSuspect(l)
		case (len(l.failing) > 0 || l.mayFollow(now)) && !l.restarting:
			if l.lettersNext = !l.lettersNext; !l.lettersNext {
				if c := e.carryOut(l); c != nil {
					return c
				}
			}
			return e.writeFailures(l)
		case len(l.letters) > 0 || len(l.commanded) > 0:
			if c := e.carryOut(l); c != nil {
				return c
			}
		}
	}
	return nil
}

// mayFollow reports whether followers are worth a statement now.
func (l *lane) mayFollow(now time.Time) bool {
	return len(l.followers) > 0 && !l.draining && (len(l.followers) >= maxFollowers/5 || !now.Before(l.followAt))
}

// choreDone handles the answer to a chore.
func (e *engine) choreDone(now time.Time, a choreAnswer) {
	c := e.chore
	retryIn, err, kind := a.retryIn, a.err, a.kind
	lost := c.lane != nil && !e.live(c.lane)
	switch {
	case err == nil && !lost:
		e.chore = nil
		if c.lane != nil {
			c.lane.choreAt, c.lane.oneByOne = time.Time{}, c.lane.oneByOne && len(c.lane.failing) > 1
		}
		if a.found != nil {
			a.found()
		}
		c.done(now)
	case lost:
		e.chore = nil
	case errors.Is(err, errFenced):
		e.chore = nil
		e.drop(c.lane.number)
	case kind == choreImpossible:
		e.chore = nil
		e.putOff(c, now.Add(retryIn), kind)
	case kind == choreLost:
		// Nobody knows whether it took effect, and it may hang again, so it yields to
		// others. The state it concerned is read again.
		e.chore = nil
		e.putOff(c, now.Add(retryIn), kind)
		e.forgetUnsent()
	default:
		e.choreFailed = true
		e.choreAt = now.Add(retryIn)
	}
}

// putOff delays a chore that could not be done, while others are done.
func (e *engine) putOff(c *chore, until time.Time, kind choreError) {
	if c.again != nil {
		*c.again = until
	} else {
		c.lane.choreAt = until
	}
	if c.undo != nil {
		c.undo(kind)
	}
}

// numbers returns the lanes for which want returns true, and marks them.
func (e *engine) numbers(want func(*lane) bool) (numbers []int, lanes []*lane) {
	for number, l := range e.lanes {
		if l != nil && want(l) {
			numbers, lanes = append(numbers, number), append(lanes, l)
		}
	}
	return numbers, lanes
}

// load reads what is parked in lanes that were just taken, or whose memory is in doubt.
// It charges the message that was alone in flight when a former owner died.
func (e *engine) load(now time.Time) *chore {
	numbers, lanes := e.numbers(func(l *lane) bool { return !l.loaded && !l.draining })
	if len(lanes) == 0 || now.Before(e.loadAt) {
		return nil
	}
	type accused struct {
		lane *lane
		parkedRow
		parked bool
	}
	var keys []parkedKey
	var suspects []accused
	ids := make([]int64, len(lanes))
	for i, l := range lanes {
		l.loading, ids[i] = true, l.suspect
	}
	return &chore{
		again: &e.loadAt,
		do: func(ctx choreContext) (func(), error) {
			there, err := ctx.store.parkedKeys(ctx, numbers)
			if err != nil {
				return nil, err
			}
			var alone []accused
			for i, id := range ids {
				if id == 0 {
					continue
				}
				row, parked, found, err := ctx.store.find(ctx, numbers[i], id)
				if err != nil {
					return nil, err
				}
				if found {
					alone = append(alone, accused{lanes[i], row, parked})
				}
			}
			return func() { keys, suspects = there, alone }, nil
		},
		done: func(now time.Time) {
			e.parkedDue(now)
			byLane := map[int]map[string]bool{}
			for _, k := range keys {
				if byLane[k.lane] == nil {
					byLane[k.lane] = map[string]bool{}
				}
				byLane[k.lane][k.key] = true
			}
			for _, l := range lanes {
				if e.live(l) && l.loading {
					l.loaded, l.loading = true, false
					l.resync(byLane[l.number])
				}
			}
			for _, s := range suspects {
				l := s.lane
				l.suspect = 0
				m := newEntry(s.Row)
				if _, known := l.entries[m.rowID()]; known || !e.live(l) {
					continue
				}
				m.parked, m.attempts, m.unanswered = s.parked, s.attempts, true // the worker died before the answer
				l.know(m)
				e.charge(m, now, classCrashed, "the worker died while this message alone was in flight")
			}
		},
	}
}

// resync makes a lane's memory of parked keys agree with the table.
func (l *lane) resync(parked map[string]bool) {
	if l.order == OrderNone {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(l.chains)) { // the order in which they go on is to repeat
		if l.chains[key].parked && !parked[key] {
			l.unpark(key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(parked)) {
		if c := l.chain(key); !c.parked {
			l.park(c)
		}
	}
}

// settle deletes confirmed rows of parked. If one of them cannot be deleted, for
// example because another transaction has locked it, the batch yields to others and is
// retried in smaller parts.
func (e *engine) settle(now time.Time) *chore {
	if len(e.settled) == 0 || now.Before(e.settleAt) {
		return nil
	}
	if e.settleMost == 0 {
		e.settleMost = maxSettled
	}
	n := min(len(e.settled), e.removeRows, e.settleMost)
	rows := slices.Clone(e.settled[:n])
	refs := entryRefs(rows)
	var unparked []parkedKey
	return &chore{
		again: &e.settleAt,
		undo: func(kind choreError) {
			if kind == choreImpossible {
				e.settled = append(slices.Delete(e.settled, 0, n), rows...)
				e.settleMost = max(1, n/2)
			}
		},
		do: func(ctx choreContext) (func(), error) {
			keys, missed, err := ctx.store.settle(ctx, refs)
			ctx.missed(missed)
			return func() { unparked = keys }, err
		},
		done: func(now time.Time) {
			e.settled = slices.Delete(e.settled, 0, n)
			e.settleMost = min(2*e.settleMost, maxSettled)
			for _, m := range rows {
				m.lane.forget(m)
				if m.parked { // otherwise its removal has counted it
					m.lane.deleted++
				}
			}
			for _, k := range unparked {
				if l := e.lanes[k.lane]; l != nil && l.loaded {
					l.unpark(k.key)
				}
			}
			e.parkedDue(now)
		},
	}
}

// newEntry returns an entry for a row.
func newEntry(r outboxstore.Row) *entry {
	m := &entry{}
	m.fill(r)
	return m
}

func (m *entry) fill(r outboxstore.Row) {
	m.Message = Message{
		Lane: r.Lane, ID: r.ID, Topic: r.Topic, MessageID: r.MessageID, Key: r.Key,
		Payload: r.Payload, CreatedAt: r.CreatedAt, entry: m,
	}
	m.ctid, m.metadata, m.hollow = r.CTID, r.Metadata, r.Hollow
}
