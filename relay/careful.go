package relay

import "time"

// writeSuspect writes down which message of a lane is about to be in flight
// alone, or that the last one is no suspect any more.
func (e *engine) writeSuspect(l *lane) *chore {
	var id int64
	m := l.announced
	if m != nil {
		id = m.ID
	}
	return &chore{
		lane: l,
		do:   func(ctx choreContext) error { return ctx.store.suspect(ctx, e.fence(l), id) },
		done: func(time.Time) {
			if l.announced == m {
				l.written, l.accused = m != nil, false
			} else {
				l.accused = true // it was forgotten meanwhile
			}
		},
	}
}

// isCalm reports that a lane whose workers have died has come through a window,
// or has nothing left: then it was not its messages.
func (e *engine) isCalm(l *lane) bool {
	if l.crashes == 0 || l.draining || l.announced != nil || l.alone != nil || len(l.failing) > 0 {
		return false
	}
	return l.proven(e.window) || l.dry && len(l.entries) == 0
}

// proven reports that so many messages of the lane came through that it was not
// them. Nothing more goes out alone then: the caution is about to end.
func (l *lane) proven(window int) bool { return l.deleted >= window }

// calm ends the caution towards lanes.
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
		do:    func(ctx choreContext) error { return ctx.store.calm(ctx, e.owner, epochs) },
		done: func(time.Time) {
			for _, l := range lanes {
				if e.live(l) && l.announced == nil {
					l.crashes, l.deleted, l.accused = 0, 0, false
				}
			}
		},
	}
}
