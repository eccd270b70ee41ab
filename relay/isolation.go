package relay

import (
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// isolation tracks whose turn it is to send a message alone. One lane at a time has the
// turn: if the worker dies, the other lanes' messages were not involved.
type isolation struct {
	turn       *lane
	sentInTurn int       // messages in a row
	began      time.Time // the turn

	// Nobody has the turn: the lanes after the last one may take it, one after the other.
	last    int // number of a lane
	next    *lane
	offered time.Time
}

// isolatedTurns is how many messages a lane sends alone, at most, before the next lane's
// turn. Ending a turn costs a write, to clear what was alone last.
const isolatedTurns = 32

// share is how long a lane may keep the turn. Then every lane has its turn within half a lease,
// if the database is not slow: the lanes have waited for the lease of the worker that died.
func (e *engine) share() time.Duration { return e.limits.lease / (2 * outbox.Lanes) }

// mayKeepTurn reports whether a turn may go on.
func (e *engine) mayKeepTurn(now time.Time) bool {
	i := &e.isolation
	return i.sentInTurn < isolatedTurns && (e.limits.lease == 0 || now.Sub(i.began) < e.share())
}

// isolatedMessages is how many messages a lane sends alone before it is trusted again: its
// part of the default window, if the worker holds all lanes. If the message that kills workers
// lies behind that, it is met again, nearer to the start. Meanwhile keys behind the others
// stand, so more would cost too much after crashes that no message has caused.
const isolatedMessages = 32

// mustBeAlone reports whether m may be the message that kills workers.
func (m *entry) mustBeAlone() bool { return m.lane.isolated() || m.crashed }

// hasTurn reports whether m may be published, if it has to go alone.
func (i *isolation) hasTurn(m *entry) bool {
	if !m.mustBeAlone() || i.turn == m.lane {
		return true
	}
	return i.turn == nil && (i.next == nil || i.next == m.lane || !m.lane.isolated())
}

// announce lets m be published alone, once that is recorded in the database.
func (i *isolation) announce(m *entry, now time.Time) {
	l := m.lane
	if i.turn != l {
		i.turn, i.sentInTurn, i.began = l, 0, now
		i.last, i.next = l.number, nil
	}
	i.sentInTurn++
	m.state = stateAnnouncing
	l.announced, l.written = m, false
}

// passTurn ends the turn of a lane that has had its share, or has nothing to send.
func (e *engine) passTurn(now time.Time) {
	l := e.isolation.turn
	switch {
	case l == nil:
	case !e.live(l):
		e.isolation.turn = nil
	case l.announced != nil, l.alone != nil, l.mustClear, e.tasks.running != nil && e.tasks.running.lane == l: // it may write what is alone
	case l.isolated() && !l.draining && e.mayKeepTurn(now) && l.ready.next() != nil:
	case l.stale:
		l.mustClear = true
	default:
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

// recordAlone records which message of a lane is about to be in flight alone, or that
// the last one no longer is.
func (e *engine) recordAlone(l *lane) *task {
	var id int64
	f := e.fence(l)
	m := l.announced
	if m != nil {
		id = m.ID
	}
	return &task{
		lane: l,
		undo: func(taskError) { l.stale = true }, // it may have been recorded anyway
		do:   func(ctx taskContext) (func(), error) { return nil, ctx.store.SetAlone(ctx, f, id) },
		done: func(time.Time) {
			switch {
			case l.announced == m:
				l.written, l.stale, l.mustClear = m != nil, false, false
			case m != nil:
				l.stale, l.mustClear = true, true // the lane forgot it meanwhile
			}
		},
	}
}

// crashesOver reports whether a lane whose workers have died has got through a window, or
// has nothing left: then its messages were not the cause.
func (e *engine) crashesOver(l *lane) bool {
	if l.crashes == 0 || l.draining || l.announced != nil || l.alone != nil || len(l.failing) > 0 {
		return false
	}
	return l.proven(e.limits.window) || l.dry && len(l.entries) == 0
}

// proven reports whether enough messages of the lane got through to show that they were
// not the cause. Nothing more is published alone then: the isolation is about to end.
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
					l.crashes, l.deleted, l.stale, l.mustClear = 0, 0, false, false
				}
			}
		},
	}
}
