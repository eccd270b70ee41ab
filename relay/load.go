package relay

import (
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// load reads the retrying keys of lanes that were just taken, or whose memory is in
// doubt. It blames the message that was alone in flight when a former owner died.
func (e *engine) load(now time.Time) *task {
	numbers, lanes := e.numbers(func(l *lane) bool { return !l.loaded && !l.draining })
	if len(lanes) == 0 || now.Before(e.tasks.loadAt) {
		return nil
	}
	type left struct {
		lane *lane
		relaystore.Row
		retrying bool
	}
	var keys []relaystore.Key
	var found []left
	ids := make([]int64, len(lanes))
	for i, l := range lanes {
		l.loading, ids[i] = true, l.leftAlone
	}
	return &task{
		again: &e.tasks.loadAt,
		do: func(ctx taskContext) (func(), error) {
			there, err := ctx.store.Keys(ctx, numbers)
			if err != nil {
				return nil, err
			}
			var alone []left
			for i, id := range ids {
				if id == 0 {
					continue
				}
				row, retrying, found, err := ctx.store.Find(ctx, numbers[i], id)
				if err != nil {
					return nil, err
				}
				if found {
					alone = append(alone, left{lanes[i], row, retrying})
				}
			}
			return func() { keys, found = there, alone }, nil
		},
		done: func(now time.Time) {
			e.due.lookFromStart(now)
			byLane := map[int]map[string]bool{}
			for _, k := range keys {
				if byLane[k.Lane] == nil {
					byLane[k.Lane] = map[string]bool{}
				}
				byLane[k.Lane][k.Key] = true
			}
			for _, l := range lanes {
				if e.live(l) && l.loading {
					l.loaded, l.loading = true, false
					l.resync(byLane[l.number])
				}
			}
			for _, s := range found {
				l := s.lane
				l.leftAlone = 0
				m := newEntry(s.Row.Row)
				if _, known := l.entries[m.rowID()]; known || !e.live(l) {
					continue
				}
				m.retrying, m.attempts, m.unanswered = s.retrying, s.Attempts, true // the worker died before the answer
				l.know(m)
				e.charge(m, now, classCrashed, "the worker died while this message alone was in flight")
			}
		},
	}
}

// resync makes a lane's memory of retrying keys agree with the table.
func (l *lane) resync(retrying map[string]bool) {
	if l.order == OrderNone {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(l.chains)) { // the order in which they go on is to repeat
		if l.chains[key].retrying && !retrying[key] {
			l.endRetrying(key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(retrying)) {
		if c := l.chain(key); !c.retrying {
			l.startRetrying(c)
		}
	}
}
