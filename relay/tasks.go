package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// task is database work other than reading the outbox and deleting confirmed rows. It
// concerns retrying messages, dead letters or crashes. Tasks run one at a time, so each
// finds the tables as the previous one left them. A task that collides with another
// transaction is retried at once. One that the database refuses or does not answer
// yields to others and is retried later. Running it twice is harmless.
type task struct {
	lane     *lane // whose lease it needs; nil: none
	failures []relaystore.Failure
	again    *time.Time      // when the next of its kind may begin, if it cannot be done; nil: its lane's
	undo     func(taskError) // nil: nothing to undo

	// do runs outside the loop, and may be left running there while the task is
	// retried. So it passes its results to the loop through the function it returns
	// (nil: none). done follows that.
	do   func(taskContext) (found func(), err error)
	done func(now time.Time)
}

// taskAnswer is the answer to a task.
type taskAnswer struct {
	found   func()
	err     error
	kind    taskError
	retryIn time.Duration
}

// taskError classifies the failure of a task.
type taskError uint8

const (
	taskLost       taskError = iota // connection lost: the database may be another one afterwards
	taskCollided                    // with another transaction
	taskImpossible                  // this one; others may be possible
)

// taskStore is what tasks need of the store.
type taskStore interface {
	relaystore.Retries
	relaystore.Crashes
}

type taskContext struct {
	context.Context //nolint:containedctx // lives for one call
	store           taskStore
	moveOrDelete    func(remove func(ctx context.Context, move bool) (removed int, err error)) error // see outboxqueue.Queue
	bring           func(rows []*outboxstore.Row, s *space)                                          // after the call: the payloads that rows lack; see pieces
	clock           func() time.Time
}

// tasks is which task runs, and when those of each kind may begin.
type tasks struct {
	running *task // or to be retried
	began   time.Time
	failed  bool
	retryAt time.Time // then

	forTurn   bool // the last one was for the lane whose turn it is, or might have been
	kind      int  // of the last one; the kinds take turns
	lane      int  // whose failures were written last; the lanes take turns
	sweepLane int  // whose swept keys were moved last

	retried     []*entry // confirmed retrying messages, to be deleted
	retriedMost int      // of them at a time

	loadAt        time.Time // not before, after a failure
	retriedAt     time.Time // not before, after a failure
	crashesAt     time.Time // not before, after a failure
	commandsAt    time.Time // when to look for operators' commands
	commandsPause time.Duration
	otherTopicsAt time.Time // when to look for topics beyond the lanes' memory
}

const (
	maxFollowers  = 500
	commandsEvery = time.Second
	commandsRest  = 2 * time.Second // at rest
	maxCommands   = 100
	maxRetried    = 500
	followLinger  = 50 * time.Millisecond
)

// tasksDue returns when the next task may begin; zero: not before an event.
func (e *engine) tasksDue() (due time.Time) {
	earlier := func(at time.Time) {
		if due.IsZero() || at.Before(due) {
			due = at
		}
	}
	switch {
	case e.tasks.failed:
		return e.tasks.retryAt
	case e.tasks.running != nil:
		return time.Time{}
	}
	if !e.due.at.IsZero() {
		earlier(e.due.at)
	}
	earlier(e.tasks.commandsAt)
	if len(e.tasks.retried) > 0 {
		earlier(e.tasks.retriedAt)
	}
	for _, l := range e.lanes {
		switch {
		case l == nil:
		case !l.loaded && !l.draining:
			earlier(e.tasks.loadAt)
		case len(l.failing) > 0, l.announced != nil && !l.written, l.mustClear:
			earlier(l.taskAt)
		case len(l.followers) > 0 && !l.draining:
			earlier(l.followAt)
		}
	}
	return due
}

func (e *engine) fence(l *lane) relaystore.Fence {
	return relaystore.Fence{Lane: l.number, Owner: e.limits.owner, Epoch: l.epoch}
}

func (e *engine) live(l *lane) bool { return e.lanes[l.number] == l }

// hasTasks reports whether a lane has something left to write. What has been put off while the lane
// was drained does not count: somebody may have locked a row or a table, nobody knows for how long.
func (e *engine) hasTasks(l *lane) bool {
	switch {
	case e.tasks.running != nil && e.tasks.running.lane == l:
		return true
	case l.putOff:
		return false
	}
	return len(l.failing) > 0 || slices.ContainsFunc(e.tasks.retried, func(m *entry) bool { return m.lane == l })
}

// nextTask returns the next database task, or nil.
func (e *engine) nextTask(now time.Time) *task {
	if e.tasks.running != nil && e.tasks.running.lane != nil && e.tasks.failed && !e.live(e.tasks.running.lane) {
		e.tasks.running, e.tasks.failed = nil, false
	}
	switch {
	case e.tasks.failed:
		if now.Before(e.tasks.retryAt) {
			return nil
		}
		e.tasks.failed = false
	case e.tasks.running != nil:
		return nil
	default:
		e.tasks.running = e.pickTask(now)
	}
	e.tasks.began = now
	return e.tasks.running
}

// pickTask returns one task that is due. The kinds take turns, so that none keeps the
// others waiting. But every second one is for the lane with the turn, if it has one: all
// isolated lanes wait for that.
func (e *engine) pickTask(now time.Time) *task {
	if e.tasks.forTurn = !e.tasks.forTurn; e.tasks.forTurn {
		if c := e.turnWrite(now); c != nil {
			return c
		}
	}
	kinds := [...]func(time.Time) *task{
		e.load, e.removeRetried, e.writeOneLane, e.moveSwept, e.lookForDue, e.lookForCommands, e.lookForOtherTopics, e.clearCrashes,
	}
	for range kinds {
		e.tasks.kind = (e.tasks.kind + 1) % len(kinds)
		if c := kinds[e.tasks.kind](now); c != nil {
			return c
		}
	}
	return nil
}

// taskDone handles the answer to a task.
func (e *engine) taskDone(now time.Time, a taskAnswer) {
	c := e.tasks.running
	until, err, kind := e.againAt(now, e.tasks.began, a.retryIn), a.err, a.kind
	lost := c.lane != nil && !e.live(c.lane)
	switch {
	case err == nil && !lost:
		e.tasks.running = nil
		if c.lane != nil {
			c.lane.taskAt, c.lane.oneByOne = time.Time{}, c.lane.oneByOne && len(c.lane.failing) > 1
		}
		if a.found != nil {
			a.found()
		}
		c.done(now)
	case lost:
		e.tasks.running = nil
	case errors.Is(err, relaystore.ErrFenced):
		e.tasks.running = nil
		e.drop(c.lane.number)
	case kind == taskImpossible:
		e.tasks.running = nil
		e.putOff(c, until, kind)
	case kind == taskLost:
		// Nobody knows whether it took effect, and it may hang again, so it yields to
		// others. The state it concerned is read again.
		e.tasks.running = nil
		e.putOff(c, until, kind)
		e.forgetUnsent()
	default:
		e.tasks.failed = true
		e.tasks.retryAt = until
	}
}

// putOff delays a task that failed, while others run.
func (e *engine) putOff(c *task, until time.Time, kind taskError) {
	if c.again != nil {
		*c.again = until
	} else {
		c.lane.taskAt = until
		c.lane.putOff = c.lane.putOff || kind == taskImpossible && c.lane.oneByOne
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
