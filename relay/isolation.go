package relay

import (
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// isolation tracks which lane with crashes has the turn to send. If the worker dies, the other
// lanes with crashes were not involved.
//
// After two crashes the messages of a lane go together in its turn: that costs one write for
// many messages. If the worker dies of them too, the lane is known, and sends one message at a
// time, with a write for each. So crashes that no message has caused cost little, however
// many lanes they hit.
type isolation struct {
	turn       *lane
	sentInTurn int       // messages in a row
	began      time.Time // the turn

	// Nobody has the turn: the lanes after the last one may take it, one after the other.
	last    int // number of a lane
	next    *lane
	offered time.Time
}

const (
	isolatedFrom = 2 // crashes; the statements of a takeover know the number, too
	singleFrom   = 3
)

// isolatedTurns is how many messages a lane sends, at most, before the next lane's turn.
// Ending a turn costs a write, to clear what was recorded last.
const isolatedTurns = 32

// share is how long a lane may keep the turn. Then every lane has its turn within half a lease,
// if the database is not slow: the lanes have waited for the lease of the worker that died.
func (e *engine) share() time.Duration { return e.limits.lease / (2 * outbox.Lanes) }

// mayKeepTurn reports whether a turn may go on.
func (e *engine) mayKeepTurn(now time.Time) bool {
	i := &e.isolation
	return i.sentInTurn < isolatedTurns && (e.limits.lease == 0 || now.Sub(i.began) < e.share())
}

// isolatedMessages is how many messages a lane sends in turns before it is trusted again: its
// part of the default window, if the worker holds all lanes. If the message that kills workers
// lies behind that, it is met again, nearer to the start. Meanwhile keys behind the others
// stand, so more would cost too much after crashes that no message has caused.
const isolatedMessages = 32

// isolated lanes send in turns.
func (l *lane) isolated() bool { return l.crashes >= isolatedFrom }

// mustBeAlone reports whether nothing else of an isolated lane may be in flight with m, so that
// m is known to be the message that kills workers.
func (m *entry) mustBeAlone() bool { return m.crashed || m.lane.crashes >= singleFrom }

// needsTurn reports whether m goes in its lane's turn only.
func (m *entry) needsTurn() bool { return m.crashed || m.lane.isolated() }

// needsRecord reports whether it must be recorded that m, or the messages of its lane, are about
// to be in flight.
func (m *entry) needsRecord() bool { return m.needsTurn() && (m.mustBeAlone() || !m.lane.together) }

// hasTurn reports whether m may be published, if it needs a turn.
func (i *isolation) hasTurn(m *entry) bool {
	if !m.needsTurn() || i.turn == m.lane {
		return true
	}
	return i.turn == nil && (i.next == nil || i.next == m.lane || !m.lane.isolated())
}

// announce lets m be published, once it is recorded in the database that m is in flight alone,
// or that the messages of its lane are, of which it is the first.
func (i *isolation) announce(m *entry, now time.Time) {
	l := m.lane
	if i.turn != l {
		i.turn, i.sentInTurn, i.began = l, 0, now
		i.last, i.next = l.number, nil
	}
	i.sentInTurn++
	m.state = stateAnnouncing
	l.announced, l.written, l.together = m, false, false
}

// sendAnnounced returns the announced message, which is recorded. A write that took long does
// not shorten the time in which the messages of the lane go together.
func (i *isolation) sendAnnounced(l *lane, now time.Time) *entry {
	m := l.announced
	l.announced, l.written = nil, false
	if l.together = !m.mustBeAlone(); l.together {
		i.began = now
	} else {
		l.alone = m
	}
	return m
}

// passTurn ends the turn of a lane that has had its share, or has nothing to send. What the
// database names of it is cleared before the next lane's messages are recorded, in one task.
func (e *engine) passTurn(now time.Time) {
	l := e.isolation.turn
	switch {
	case l == nil:
	case !e.live(l):
		e.isolation.turn = nil
	case l.announced != nil, l.alone != nil, e.tasks.running != nil && e.tasks.running.lane == l: // it may write what is alone
	case l.isolated() && !l.draining && e.mayKeepTurn(now) && l.ready.next() != nil:
	case l.together && l.inFlight > 0: // they are still recorded
	default:
		l.mustClear = l.mustClear || l.together || l.stale
		l.together, l.stale = false, l.mustClear
		e.isolation.turn = nil
	}
	if e.isolation.turn == nil {
		e.offerTurn(now)
	}
}

// offerTurn lets the isolated lanes take the turn in their order. Otherwise it would go to
// those that the rounds over all lanes happen to come to. One that does not take it is passed
// over.
func (e *engine) offerTurn(now time.Time) {
	i := &e.isolation
	if i.next != nil {
		if e.wantsTurn(i.next, now) && now.Sub(i.offered) <= e.share() {
			return
		}
		i.last, i.next = i.next.number, nil
	}
	for n := range e.lanes {
		l := e.lanes[(i.last+1+n)%len(e.lanes)]
		if l != nil && e.wantsTurn(l, now) {
			i.next, i.offered = l, now
			return
		}
	}
}

// wantsTurn reports whether an isolated lane has something to send.
func (e *engine) wantsTurn(l *lane, now time.Time) bool {
	if !e.live(l) || !l.isolated() || !e.mayPublish(l, now) || l.proven(e.limits.window) {
		return false
	}
	m := l.ready.next()
	return m != nil && !m.hollow
}

// turnWrite returns what the lane with the turn has to record, or that nothing of a lane is in
// flight any more.
func (e *engine) turnWrite(now time.Time) *task {
	if l := e.isolation.turn; l != nil && e.live(l) && l.announced != nil {
		if !l.written {
			return e.writeLane(l, now)
		}
		return nil
	}
	for _, l := range e.lanes {
		if l != nil && l.mustClear {
			if c := e.writeLane(l, now); c != nil {
				return c
			}
		}
	}
	return nil
}

// recordAlone records which message of a lane is about to be in flight alone, or that several
// are, or that nothing recorded is any more. First it clears what is recorded of other lanes. If
// that is impossible for one, the others do not wait: at worst it counts a crash too many.
func (e *engine) recordAlone(l *lane, now time.Time) *task {
	var id int64
	f := e.fence(l)
	m := l.announced
	switch {
	case m == nil:
	case m.mustBeAlone():
		id = m.ID
	default:
		id = relaystore.WholeLane
	}
	var over []*lane
	var fences []relaystore.Fence
	for _, o := range e.lanes {
		if o != nil && o != l && o.mustClear && !now.Before(o.taskAt) {
			over, fences = append(over, o), append(fences, e.fence(o))
			o.taskAt = now.Add(clearAgain) // the statement may hang, and this task with it
		}
	}
	locked := make([]bool, len(over))
	return &task{
		lane: l,
		undo: func(taskError) { l.stale = true }, // it may have been recorded anyway
		do: func(ctx taskContext) (func(), error) {
			failed := make([]bool, len(fences))
			for i, o := range fences {
				failed[i] = ctx.store.SetAlone(ctx, o, 0) != nil
			}
			return func() { locked = failed }, ctx.store.SetAlone(ctx, f, id)
		},
		done: func(now time.Time) {
			for i, o := range over {
				if locked[i] {
					o.taskAt = now.Add(clearAgain)
				} else {
					o.stale, o.mustClear, o.taskAt = false, false, time.Time{}
				}
			}
			switch {
			case l.announced == m:
				l.written, l.stale, l.mustClear = m != nil, false, false
			case m != nil:
				l.stale, l.mustClear = true, true // the lane forgot it meanwhile
			}
		},
	}
}

// clearAgain is the pause after a record that could not be cleared: the row may be locked.
const clearAgain = time.Second

// crashesOver reports whether a lane whose workers have died has got through a window, or
// has nothing left: then its messages were not the cause.
func (e *engine) crashesOver(l *lane) bool {
	if l.crashes == 0 || l.draining || l.announced != nil || l.alone != nil || len(l.failing) > 0 {
		return false
	}
	return l.proven(e.limits.window) || l.dry && len(l.entries) == 0
}

// proven reports whether enough messages of the lane got through to show that they were
// not the cause. Nothing more is published in turns then: the isolation is about to end.
func (l *lane) proven(window int) bool {
	if l.isolated() {
		window = min(window, isolatedMessages)
	}
	return l.deleted >= window
}

// clearCrashes ends the isolation of lanes.
func (e *engine) clearCrashes(now time.Time) *task {
	if now.Before(e.tasks.crashesAt) {
		return nil
	}
	epochs := map[int]int64{}
	var lanes []*lane
	for number, l := range e.lanes {
		if l != nil && l.loaded && e.crashesOver(l) {
			epochs[number], lanes = l.epoch, append(lanes, l)
		}
	}
	if len(lanes) == 0 {
		return nil
	}
	return &task{
		again: &e.tasks.crashesAt,
		do:    func(ctx taskContext) (func(), error) { return nil, ctx.store.ClearCrashes(ctx, e.limits.owner, epochs) },
		done: func(time.Time) {
			for _, l := range lanes {
				if e.live(l) && l.announced == nil {
					l.crashes, l.deleted, l.stale, l.mustClear, l.together = 0, 0, false, false, false
				}
			}
		},
	}
}
