package relay

import "time"

// solo tracks whose turn it is to send a message alone. One lane at a time has the
// turn: if the worker dies, the other lanes' messages were not involved.
type solo struct {
	turn  *lane
	turns int // messages in a row
}

// maxTurns is how many messages a lane sends alone before the next lane's turn. Ending
// a turn costs a write, to clear the last suspect.
const maxTurns = 32

// aloneForCalm is how many messages a lane sends alone before it is trusted again: more
// than its part of most windows. If the message that kills workers lies behind that, it
// is met again, nearer to the start.
const aloneForCalm = 64

// goesAlone reports whether m may be the message that kills workers.
func (m *entry) goesAlone() bool { return m.lane.careful() || m.crashed }

// hasTurn reports whether m may go out, if it has to go alone.
func (e *engine) hasTurn(m *entry) bool {
	return !m.goesAlone() || e.turn == nil || e.turn == m.lane
}

// announce lets m go out alone, once that is recorded in the database.
func (e *engine) announce(m *entry) {
	l := m.lane
	if e.turn != l {
		e.turn, e.turns = l, 0
	}
	e.turns++
	m.state = announcing
	l.announced, l.written = m, false
}

// passTurn ends the turn of a lane that has had its share, or has nothing to send.
func (e *engine) passTurn() {
	l := e.turn
	switch {
	case l == nil:
	case !e.live(l):
		e.turn = nil
	case l.announced != nil, l.alone != nil, l.accused, e.chore != nil && e.chore.lane == l: // it may write the suspect
	case l.careful() && !l.draining && e.turns < maxTurns && l.ready.next() != nil:
	case l.stale:
		l.accused = true
	default:
		e.turn = nil
	}
}

// writeSuspect records which message of a lane is about to be in flight alone, or that
// the last one is no longer a suspect.
func (e *engine) writeSuspect(l *lane) *chore {
	var id int64
	f := e.fence(l)
	m := l.announced
	if m != nil {
		id = m.ID
	}
	return &chore{
		lane: l,
		undo: func(choreError) { l.stale = true }, // it may have been recorded anyway
		do:   func(ctx choreContext) (func(), error) { return nil, ctx.store.suspect(ctx, f, id) },
		done: func(time.Time) {
			switch {
			case l.announced == m:
				l.written, l.stale, l.accused = m != nil, false, false
			case m != nil:
				l.stale, l.accused = true, true // the lane forgot it meanwhile
			}
		},
	}
}

// isCalm reports whether a lane whose workers have died has got through a window, or
// has nothing left: then its messages were not the cause.
func (e *engine) isCalm(l *lane) bool {
	if l.crashes == 0 || l.draining || l.announced != nil || l.alone != nil || len(l.failing) > 0 {
		return false
	}
	return l.proven(e.window) || l.dry && len(l.entries) == 0
}

// proven reports whether enough messages of the lane got through to show that they were
// not the cause. Nothing more goes out alone then: the caution is about to end.
func (l *lane) proven(window int) bool {
	if l.careful() {
		window = min(window, aloneForCalm)
	}
	return l.deleted >= window
}

// calm ends the caution for lanes.
func (e *engine) calm(now time.Time) *chore {
	if now.Before(e.calmAt) {
		return nil
	}
	epochs := map[int]int64{}
	var lanes []*lane
	for number, l := range e.lanes {
		if l != nil && l.loaded && e.isCalm(l) {
			epochs[number], lanes = l.epoch, append(lanes, l)
		}
	}
	if len(lanes) == 0 {
		return nil
	}
	return &chore{
		again: &e.calmAt,
		do:    func(ctx choreContext) (func(), error) { return nil, ctx.store.calm(ctx, e.owner, epochs) },
		done: func(time.Time) {
			for _, l := range lanes {
				if e.live(l) && l.announced == nil {
					l.crashes, l.deleted, l.stale, l.accused = 0, 0, false, false
				}
			}
		},
	}
}
