package relay

import (
	"slices"
	"time"
)

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
	return l.deleted >= e.window || l.dry && len(l.entries) == 0
}

// calm ends the caution towards lanes.
func (e *engine) calm(lanes []*lane) *chore {
	epochs := map[int]int64{}
	for _, l := range lanes {
		epochs[l.number] = l.epoch
	}
	return &chore{
		do: func(ctx choreContext) error { return ctx.store.calm(ctx, e.owner, epochs) },
		done: func(time.Time) {
			for _, l := range lanes {
				if slices.Contains(e.lanes[:], l) && l.announced == nil {
					l.crashes, l.deleted, l.accused = 0, 0, false
				}
			}
		},
	}
}
