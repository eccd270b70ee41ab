package relay

import (
	"slices"
	"time"
)

const (
	dueHeads     = 64  // keys in one look for what is due
	dueRows      = 32  // of each
	maxDueHeads  = 256 // where keys have few rows, and small ones
	manyDueRows  = 1024
	manyDueBytes = 2 << 20

	// lookAgain is the pause before looking for due rows again when some cannot be
	// taken now.
	lookAgain = 100 * time.Millisecond

	// lookSlow is how long a look may take without a rest as long after it, for other
	// chores.
	lookSlow = 50 * time.Millisecond

	// lookAnyway is the longest pause while keys are parked: a former owner whose
	// confirm comes late removes a row and makes its successor due, and this worker
	// is not told.
	lookAnyway = 10 * time.Second
)

// parkedDue makes the engine look for due rows at a time.
func (c *chores) parkedDue(at time.Time) {
	if c.dueAt.IsZero() || at.Before(c.dueAt) {
		c.dueAt = at
	}
}

// lookForDue brings parked rows whose time has come, but of topics that are stuck.
func (e *engine) lookForDue(now time.Time) *chore {
	if slices.ContainsFunc(e.passedOver, func(topic string) bool { return !e.stuck(e.find(topic), now) }) {
		e.passedOver = nil
		e.parkedDue(now)
	}
	if e.dueAt.IsZero() || now.Before(e.dueAt) {
		return nil
	}
	e.dueAt = time.Time{}
	e.leaveParked(now)
	req := dueRequest{topics: e.passOver(now), heads: max(dueHeads, e.heads)}
	req.rows = dueRows * dueHeads / req.heads
	var lanes []*lane
	full, skipped := false, false
	for _, l := range e.lanes {
		switch {
		case l == nil, l.draining:
			continue
		case now.After(l.trusted):
			l.overlooked, skipped = true, true
			continue
		case !l.loaded: // it is looked at when it is
			skipped = true
			continue
		}
		room, known := e.parkedRoom(l)
		if room.none() {
			full = true
			continue
		}
		lanes, req.lanes, req.known = append(lanes, l), append(req.lanes, l.number), append(req.known, known...)
	}
	var rows []parkedRow
	next := time.Duration(-1)
	var rest time.Duration
	return &chore{
		again: &e.dueAt,
		do: func(ctx choreContext) (err error) {
			if len(req.lanes) == 0 {
				return nil
			}
			begin := time.Now()
			rows, next, err = ctx.store.due(ctx, req)
			if took := time.Since(begin); took > lookSlow {
				rest = took
			}
			return err
		},
		done: func(now time.Time) {
			e.passedOver = req.topics
			e.heads = nextHeads(req.heads, rows)
			added := e.addParked(rows, now)
			if !full && !skipped && len(rows) == 0 {
				e.nothingParked(req.topics)
			}
			switch {
			case added > 0:
				e.parkedDue(now.Add(rest))
			case full || len(rows) > 0:
				e.parkedDue(now.Add(lookAgain))
			case next >= 0:
				e.parkedDue(now.Add(min(next, lookAnyway)))
			case slices.ContainsFunc(lanes, (*lane).hasParkedKeys):
				e.parkedDue(now.Add(lookAnyway))
			}
		},
	}
}

// nothingParked lets go of the circuits of topics other than these: nothing more is due
// of them.
func (e *engine) nothingParked(but []string) {
	for _, t := range slices.Clone(e.topics) {
		if t.parked && !slices.Contains(but, t.name) {
			t.parked = false
			e.forget(t)
		}
	}
}

// nextHeads returns how many keys to look for after a look for some that brought
// these rows: unkeyed rows come one at a time, and there may be very many of them.
func nextHeads(heads int, rows []parkedRow) int {
	bytes := 0
	for _, r := range rows {
		bytes += len(r.Payload) + len(r.Metadata)
	}
	switch {
	case len(rows) > manyDueRows || bytes > manyDueBytes:
		return max(dueHeads, heads/2)
	case len(rows) >= heads:
		return min(maxDueHeads, 2*heads)
	}
	return heads
}

// room is how many rows of parked a lane may take, and bytes of payload and metadata;
// the last row may be too large.
type room struct{ rows, bytes int }

func (r room) none() bool { return r.rows <= 0 || r.bytes <= 0 }

// parkedRoom returns a lane's room for rows of parked, and those that it has. The rest
// of its memory is for what comes from the outbox. The few that an open circuit keeps to
// probe with take no room, else they would keep others out: see leaveParked.
func (e *engine) parkedRoom(l *lane) (r room, known []int64) {
	r = room{rows: maxEntries * e.laneRows / 4, bytes: e.laneBytes}
	for _, m := range l.entries {
		if !m.parked {
			continue
		}
		known = append(known, m.ID)
		if t := e.find(m.Topic); m.state != withheld || t == nil || t.state != opened {
			r.rows--
			r.bytes -= m.size()
		}
	}
	return r, known
}

// addParked takes rows of parked that are due, those of a key together and in
// order.
func (e *engine) addParked(rows []parkedRow, now time.Time) (added int) {
	opened, rooms := map[*chain]bool{}, map[*lane]*room{}
	for _, r := range rows {
		l := e.lanes[r.Lane]
		if l == nil || !l.loaded || l.draining {
			continue
		}
		if rooms[l] == nil {
			has, _ := e.parkedRoom(l)
			rooms[l] = &has
		}
		if _, known := l.entries[r.ID]; known || rooms[l].none() {
			continue
		}
		m := newEntry(r.Row)
		m.parked, m.attempts, m.crashed = true, r.attempts, r.crashed
		if limit := e.attempts.TimeLimit; limit > 0 && m.attempts > 0 {
			m.expires = now.Add(limit - r.age)
		}
		if key := l.orderKey(m); key != "" {
			c := l.chain(key)
			switch {
			case !c.parked:
				l.loaded = false // the memory is wrong: learn anew
				continue
			case c.stopped(), c.head != nil && !opened[c]:
				continue
			}
			opened[c] = true
		}
		l.know(m)
		l.place(m)
		rooms[l].rows--
		rooms[l].bytes -= m.size()
		added++
	}
	return added
}
