package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// lackingPayload returns the rows that lack their payload.
func lackingPayload(rows []relaystore.Row) (lacking []*outboxstore.Row) {
	for i := range rows {
		if r := &rows[i].Row; r.Missing > 0 {
			lacking = append(lacking, r)
		}
	}
	return lacking
}

// withPayloads drops rows that lack their payload, and those that follow them in their
// keys.
func withPayloads(rows []relaystore.Row) []relaystore.Row {
	short := map[relaystore.Key]bool{}
	return slices.DeleteFunc(rows, func(r relaystore.Row) bool {
		key := relaystore.Key{Lane: r.Lane, Key: r.Key}
		if r.Missing > 0 && r.Key != "" {
			short[key] = true
		}
		return r.Missing > 0 || short[key]
	})
}

// nextHeads returns how many keys to look for after a look that returned these rows.
// Unkeyed rows come one at a time, and there may be very many of them.
func nextHeads(heads int, rows []relaystore.Row) int {
	switch {
	case len(rows) > manyDueRows:
		return max(dueHeads, heads/2)
	case len(rows) >= heads:
		return min(maxDueHeads, 2*heads)
	}
	return heads
}

// room is how many retrying messages a lane may take, and how many bytes of payload and
// metadata; the last row may exceed it.
type room struct{ rows, bytes int }

func (r room) none() bool { return r.rows <= 0 || r.bytes <= 0 }

// retryingRoom returns a lane's room for retrying messages, and those it has. The rest of
// its memory is for rows of the outbox. The few that an open circuit keeps to probe
// with take no room, or they would exclude others: see leaveRetrying.
func (e *engine) retryingRoom(l *lane) (r room, known []outboxstore.Known) {
	r = room{rows: maxEntries * e.limits.laneRows / 4, bytes: e.limits.laneBytes}
	for _, m := range l.entries {
		if !m.retrying {
			continue
		}
		known = append(known, outboxstore.Known{ID: m.ID, CreatedAt: m.CreatedAt})
		if m.state == stateWithheld && e.paused.on(m) {
			continue
		}
		if t := e.circuits.find(m.Topic); m.state != stateWithheld || t == nil || t.state != circuitOpen {
			r.rows--
			r.bytes -= m.size()
		}
	}
	return r, known
}

// addRetrying adds due retrying messages, those of one key together and in order.
func (e *engine) addRetrying(rows []relaystore.Row, now time.Time) (added int) {
	opened, rooms, passed := map[*chain]bool{}, map[*lane]*room{}, map[relaystore.Key]bool{}
	for _, r := range rows {
		l := e.lanes[r.Lane]
		if l == nil || !l.loaded || l.draining {
			continue
		}
		if rooms[l] == nil {
			has, _ := e.retryingRoom(l)
			rooms[l] = &has
		}
		m := newEntry(r.Row)
		barred := relaystore.Key{Lane: r.Lane, Key: l.orderKey(m)}
		if known := l.entries[m.rowID()]; known != nil || rooms[l].none() || passed[barred] {
			// What follows it in its key must not overtake it.
			passed[barred] = barred.Key != ""
			if known != nil && known.state == stateFollower {
				l.loaded = false // moved without notice: load again
			}
			continue
		}
		m.retrying, m.attempts, m.crashed, m.unanswered, m.told = true, r.Attempts, r.Crashed, r.Unanswered, r.Unanswered
		if r.Tried && m.attempts == 0 {
			m.failedAt, m.unclearSince = max(1, e.publishing.sent), now.Add(-r.Age)
		}
		m.age = r.Age - r.Late
		if key := l.orderKey(m); key != "" {
			c := l.chain(key)
			switch {
			case !c.retrying:
				l.loaded = false // the memory is wrong: load again
				continue
			case c.stopped(), c.head != nil && !opened[c]:
				continue
			}
			opened[c] = true
		}
		l.know(m)
		l.enqueue(m)
		rooms[l].rows--
		rooms[l].bytes -= m.size()
		added++
	}
	return added
}
