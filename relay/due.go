package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

const (
	dueHeads    = 64  // keys in one look for what is due
	dueRows     = 32  // of each
	maxDueHeads = 256 // where keys have few rows, and small ones
	dueTopics   = 64  // of each lane in one look
	manyDueRows = 1024

	// The size of a look adapts to what the connection to the database carries in time,
	// like a read; see pace.
	leastDueBytes = 16 << 10
	firstDueBytes = 256 << 10
	mostDueBytes  = 4 << 20

	// lookAgain is the pause before looking for due rows again when some cannot be
	// taken now.
	lookAgain = 100 * time.Millisecond

	// lookSlow is how long a look may take before other chores get a break of the same
	// length.
	lookSlow = 50 * time.Millisecond

	// lookAnyway is the longest pause while keys are parked. A late confirm at a former
	// owner removes a row and makes its successor due, and this worker is not notified.
	lookAnyway = 10 * time.Second
)

// parkedDue schedules a look for due rows of all topics.
func (c *chores) parkedDue(at time.Time) {
	c.dueAgain = c.dueAgain || c.dueAfter != ""
	c.lookAt(at)
}

// lookAt schedules a look for due rows that continues where the last one ended.
func (c *chores) lookAt(at time.Time) {
	if c.dueAt.IsZero() || at.Before(c.dueAt) {
		c.dueAt = at
	}
}

// lookForDue reads due parked rows, except those of stuck topics.
func (e *engine) lookForDue(now time.Time) *chore {
	if slices.ContainsFunc(e.passedOver, func(topic string) bool { return !e.stuck(e.find(topic), now) }) {
		e.passedOver = nil
		e.parkedDue(now)
	}
	if e.dueAt.IsZero() || now.Before(e.dueAt) {
		return nil
	}
	allowed := e.allowance(now)
	if allowed < 1 {
		e.dueAt = now.Add(time.Second / wastedPerSecond)
		return nil
	}
	e.dueAt = time.Time{}
	e.leaveParked(now)
	req, lanes, full, skipped := e.dueRequest(now, allowed)
	if req.after == "" {
		e.dueNext, e.dueFound, e.dueAgain = -1, false, false
	}
	found := looked{next: -1}
	var rest, took time.Duration
	var lacking []*outboxstore.Row
	brought, space := 0, e.space()
	return &chore{
		again: &e.dueAt,
		undo:  func(choreError) { e.dueBytes.failed() },
		do: func(ctx choreContext) (func(), error) {
			if len(req.lanes) == 0 {
				return nil, nil
			}
			begin := ctx.clock()
			there, err := ctx.store.look(ctx, req)
			spent := ctx.clock().Sub(begin)
			large := there.lacking()
			if large != nil {
				ctx.bring(large, space)
			}
			bytes := bytesOf(there.rows)
			return func() { found, took, lacking, brought = there, spent, large, bytes }, err
		},
		done: func(now time.Time) {
			e.passedOver = req.topics
			if req.heads >= dueHeads {
				e.heads = nextHeads(req.heads, found.rows)
			}
			if brought >= req.bytes {
				e.dueBytes.took(took, e.quickRead)
			}
			large := req.inline || len(lacking) > 0
			missing := len(lacking) > 0 && !slices.ContainsFunc(lacking, func(r *outboxstore.Row) bool { return r.Missing == 0 })
			switch {
			case missing: // others go first
				rest = max(took, lookAgain)
			case took > lookSlow:
				rest = took
			}
			found.rows = withPayloads(found.rows)
			added := e.addParked(found.rows, now)
			e.dueAfter = found.more
			// Large rows may take all the places of a look, and come one by one. So the
			// others have every second look, at the same topics.
			if e.dueInline = len(lacking) > 0 && !req.inline; e.dueInline {
				e.dueAfter = req.after
			}
			e.dueFound = e.dueFound || full || skipped || large || len(found.rows) > 0
			if found.next >= 0 && (e.dueNext < 0 || found.next < e.dueNext) {
				e.dueNext = found.next
			}
			if e.dueAfter == "" && !e.dueFound {
				e.nothingParked(req.topics)
			}
			switch {
			case added > 0, e.dueAfter != "", e.dueAgain, large: // some are yet to be looked at or read
				e.lookAt(now.Add(rest))
			case full || len(found.rows) > 0:
				e.lookAt(now.Add(lookAgain))
			case e.dueNext >= 0:
				e.lookAt(now.Add(min(e.dueNext, lookAnyway)))
			case slices.ContainsFunc(lanes, (*lane).hasParkedKeys):
				e.lookAt(now.Add(lookAnyway))
			}
		},
	}
}

// dueRequest returns what to look for, and in which lanes. full and skipped report that
// there are others, without room or not to be looked at now.
func (e *engine) dueRequest(now time.Time, allowed int) (req dueRequest, lanes []*lane, full, skipped bool) {
	req = dueRequest{topics: e.passOver(now), heads: min(max(dueHeads, e.heads), allowed), after: e.dueAfter, most: dueTopics, bytes: e.dueBytes.size, inline: e.dueInline}
	req.rows = dueRows * dueHeads / req.heads
	for _, l := range e.lanes {
		switch {
		case l == nil, l.draining:
			continue
		case now.After(l.trusted):
			l.overlooked, skipped = true, true
			continue
		case !l.loaded: // looked at once it is loaded
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
	return req, lanes, full, skipped
}

// lacking returns the rows that lack their payload.
func (l *looked) lacking() (rows []*outboxstore.Row) {
	for i := range l.rows {
		if r := &l.rows[i].Row; r.Missing > 0 {
			rows = append(rows, r)
		}
	}
	return rows
}

// withPayloads drops rows that lack their payload, and those that follow them in their
// keys.
func withPayloads(rows []parkedRow) []parkedRow {
	short := map[parkedKey]bool{}
	return slices.DeleteFunc(rows, func(r parkedRow) bool {
		key := parkedKey{r.Lane, r.Key}
		if r.Missing > 0 && r.Key != "" {
			short[key] = true
		}
		return r.Missing > 0 || short[key]
	})
}

// nothingParked releases the circuits of topics other than these: nothing more of them
// is due.
func (e *engine) nothingParked(but []string) {
	for _, t := range slices.Clone(e.topics) {
		if t.parked && !slices.Contains(but, t.name) {
			t.parked = false
			e.forget(t)
		}
	}
}

// nextHeads returns how many keys to look for after a look that returned these rows.
// Unkeyed rows come one at a time, and there may be very many of them.
func nextHeads(heads int, rows []parkedRow) int {
	switch {
	case len(rows) > manyDueRows:
		return max(dueHeads, heads/2)
	case len(rows) >= heads:
		return min(maxDueHeads, 2*heads)
	}
	return heads
}

// room is how many rows of parked a lane may take, and how many bytes of payload and
// metadata; the last row may exceed it.
type room struct{ rows, bytes int }

func (r room) none() bool { return r.rows <= 0 || r.bytes <= 0 }

// parkedRoom returns a lane's room for rows of parked, and the rows it has. The rest of
// its memory is for rows of the outbox. The few that an open circuit keeps to probe
// with take no room, or they would exclude others: see leaveParked.
func (e *engine) parkedRoom(l *lane) (r room, known []outboxstore.Known) {
	r = room{rows: maxEntries * e.laneRows / 4, bytes: e.laneBytes}
	for _, m := range l.entries {
		if !m.parked {
			continue
		}
		known = append(known, outboxstore.Known{ID: m.ID, CreatedAt: m.CreatedAt})
		if t := e.find(m.Topic); m.state != withheld || t == nil || t.state != opened {
			r.rows--
			r.bytes -= m.size()
		}
	}
	return r, known
}

// addParked adds due rows of parked, those of one key together and in order.
func (e *engine) addParked(rows []parkedRow, now time.Time) (added int) {
	opened, rooms, passed := map[*chain]bool{}, map[*lane]*room{}, map[parkedKey]bool{}
	for _, r := range rows {
		l := e.lanes[r.Lane]
		if l == nil || !l.loaded || l.draining {
			continue
		}
		if rooms[l] == nil {
			has, _ := e.parkedRoom(l)
			rooms[l] = &has
		}
		m := newEntry(r.Row)
		barred := parkedKey{r.Lane, l.orderKey(m)}
		if known := l.entries[m.rowID()]; known != nil || rooms[l].none() || passed[barred] {
			// What follows it in its key must not overtake it.
			passed[barred] = barred.key != ""
			if known != nil && known.state == follower {
				l.loaded = false // moved without notice: load again
			}
			continue
		}
		m.parked, m.attempts, m.crashed, m.unanswered = true, r.attempts, r.crashed, r.unanswered
		if r.tried && m.attempts == 0 {
			m.failedAt, m.doubted = max(1, e.sent), now.Add(-r.age)
		}
		if limit := e.attempts.TimeLimit; limit > 0 && m.attempts > 0 {
			m.expires = now.Add(limit - r.age)
		}
		if key := l.orderKey(m); key != "" {
			c := l.chain(key)
			switch {
			case !c.parked:
				l.loaded = false // the memory is wrong: load again
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
