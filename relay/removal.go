package relay

import (
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// maxUndeleted is how many confirmed rows may wait for deletion before reads stop.
const maxUndeleted = 1 << 15

// removals are the rows that the broker has confirmed and that are to be deleted. One
// deletion runs at a time. It is right whoever holds the lane, so it goes on when a
// lane is lost.
type removals struct {
	linger   time.Duration // a confirmed row waits so long for others to be deleted with
	mostRows int           // in one deletion
	enough   int           // worth one if none are about to join them

	confirmed []*entry  // not yet handed to a deletion
	since     time.Time // the oldest of confirmed

	removing []*entry // the running deletion, or the one to be retried
	most     int      // rows in one
	running  bool
	began    time.Time // the running or the last one
	retryAt  time.Time // when a failed deletion is retried

	// locked are rows that another transaction has locked, or that cannot be deleted.
	// They are retried separately from the others, which go on.
	locked      []*entry
	lockedAt    time.Time
	lockedRetry backoff.BackOff
}

func newRemovals(l limits) removals {
	return removals{linger: l.linger, mostRows: l.removeRows, enough: l.laneRows, most: l.removeRows, lockedRetry: drawnBackOff(l.draw)}
}

// removeAnswer is the answer to a deletion.
type removeAnswer struct {
	err     error
	lost    bool              // connection lost: the database may be another one afterwards
	retryIn time.Duration     // after an error
	locked  []outboxstore.Ref // rows that still exist, locked by another transaction
}

func (r *removals) add(m *entry, now time.Time) {
	if len(r.confirmed) == 0 {
		r.since = now
	}
	r.confirmed = append(r.confirmed, m)
}

// undeleted returns the number of confirmed rows that are not yet deleted.
func (r *removals) undeleted() int { return len(r.confirmed) + len(r.removing) + len(r.locked) }

// owes reports whether a lane has confirmed rows that are not yet deleted. It ignores
// rows that another transaction has locked: nobody knows for how long.
func (r *removals) owes(l *lane) bool {
	of := func(m *entry) bool { return m.lane == l }
	return slices.ContainsFunc(r.removing, of) || slices.ContainsFunc(r.confirmed, of)
}

// next returns confirmed rows to delete, or nil. They are collected briefly, so that a
// deletion is worth its round trip. idle reports that nothing is in flight.
func (r *removals) next(now time.Time, idle bool) []outboxstore.Ref {
	switch {
	case r.running || now.Before(r.retryAt):
		return nil
	case len(r.removing) > 0: // its answer was lost; retried unchanged
	case len(r.confirmed) > 0 && (r.worthIt(idle) || now.Sub(r.since) >= r.linger):
		r.removing, r.confirmed = split(r.confirmed, r.most)
		r.since = now
	case len(r.locked) > 0 && !now.Before(r.lockedAt):
		r.removing, r.locked = split(r.locked, r.most)
	default:
		return nil
	}
	r.running, r.began = true, now
	return entryRefs(r.removing)
}

// split takes up to n of a list from its start.
func split(list []*entry, n int) (taken, rest []*entry) {
	n = min(n, len(list))
	return slices.Clone(list[:n]), slices.Delete(list, 0, n)
}

// worthIt reports whether waiting for more confirmed rows is not worth it: there
// are many, or quite a few and none are about to join them.
func (r *removals) worthIt(idle bool) bool {
	return len(r.confirmed) >= r.mostRows || idle && len(r.confirmed) >= r.enough
}

func (m *entry) ref() outboxstore.Ref {
	return outboxstore.Ref{Lane: m.Lane, ID: m.ID, MessageID: m.MessageID, CreatedAt: m.CreatedAt, CTID: m.ctid}
}

// removed handles the answer to a deletion. A deletion that failed, or whose answer was
// lost, is retried: nothing confirmed is forgotten before it is gone. Reads and other
// lanes go on meanwhile. A failing deletion yields to the others and is retried in
// smaller parts, down to the row that is the cause.
func (e *engine) removed(now time.Time, a removeAnswer) {
	e.removals.running = false
	if a.err != nil {
		e.removals.retryAt = e.againAt(now, e.removals.began, a.retryIn)
		if a.lost {
			e.forgetUnsent()
		} else {
			e.removals.split(now)
		}
		return
	}
	locked := make(map[rowID]bool, len(a.locked))
	for _, ref := range a.locked {
		locked[rowID{ref.ID, ref.CreatedAt.UnixMicro()}] = true
	}
	again := 0
	for _, m := range e.removals.removing {
		if locked[m.rowID()] {
			m.lane.lockedOut(m)
			e.removals.locked = append(e.removals.locked, m)
			again++
			continue
		}
		m.lane.forget(m)
		m.lane.through++
		if m.late || !e.live(m.lane) || now.After(m.lane.trusted) {
			e.tasks.retried = append(e.tasks.retried, m) // it may have been moved to the table parked
		}
	}
	switch {
	case again > 0:
		e.removals.lockedAt = now.Add(e.removals.lockedRetry.NextBackOff())
	case len(e.removals.locked) == 0:
		e.removals.lockedRetry.Reset()
	}
	e.removals.removing = nil
	e.removals.most = min(2*e.removals.most, e.limits.removeRows)
}

// split moves the rows of a failed deletion behind the others.
func (r *removals) split(now time.Time) {
	if m := r.removing[0]; len(r.removing) == 1 {
		m.lane.lockedOut(m)
		r.locked, r.lockedAt = append(r.locked, m), now.Add(r.lockedRetry.NextBackOff())
	} else {
		if len(r.confirmed) == 0 {
			r.since = now
		}
		r.confirmed = append(r.confirmed, r.removing...)
	}
	r.most = max(1, len(r.removing)/2)
	r.removing = nil
}

// wakeAt returns when the next deletion may begin; zero: not before an event.
func (r *removals) wakeAt() (due time.Time) {
	if r.running {
		return due
	}
	if len(r.confirmed) > 0 {
		due = r.since.Add(r.linger)
	} else if len(r.locked) > 0 {
		due = r.lockedAt
	}
	if len(r.removing) > 0 || !due.IsZero() && due.Before(r.retryAt) {
		due = r.retryAt
	}
	return due
}
