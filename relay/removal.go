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
	confirmed []*entry  // not yet handed to a deletion
	since     time.Time // the oldest of confirmed

	removing     []*entry // the running deletion, or the one to be retried
	removeMost   int      // rows in one
	removeActive bool
	removeAt     time.Time // when a failed deletion is retried

	// locked are rows that another transaction has locked, or that cannot be deleted.
	// They are retried separately from the others, which go on.
	locked      []*entry
	lockedAt    time.Time
	lockedRetry backoff.BackOff
}

func newRemovals(d draw, rows int) removals {
	return removals{removeMost: rows, lockedRetry: drawnBackOff(d)}
}

// removeAnswer is the answer to a deletion.
type removeAnswer struct {
	err     error
	lost    bool              // connection lost: the database may be another one afterwards
	retryIn time.Duration     // after an error
	locked  []outboxstore.Ref // rows that still exist, locked by another transaction
}

func (e *engine) addConfirmed(m *entry, now time.Time) {
	if len(e.confirmed) == 0 {
		e.since = now
	}
	e.confirmed = append(e.confirmed, m)
}

// undeleted returns the number of confirmed rows that are not yet deleted.
func (r *removals) undeleted() int { return len(r.confirmed) + len(r.removing) + len(r.locked) }

// owes reports whether a lane has confirmed rows that are not yet deleted. It ignores
// rows that another transaction has locked: nobody knows for how long.
func (r *removals) owes(l *lane) bool {
	of := func(m *entry) bool { return m.lane == l }
	return slices.ContainsFunc(r.removing, of) || slices.ContainsFunc(r.confirmed, of)
}

// nextRemoval returns confirmed rows to delete, or nil. They are collected briefly, so
// that a deletion is worth its round trip.
func (e *engine) nextRemoval(now time.Time) []outboxstore.Ref {
	switch {
	case e.removeActive || now.Before(e.removeAt):
		return nil
	case len(e.removing) > 0: // its answer was lost; retried unchanged
	case len(e.confirmed) > 0 && (e.worthRemoving() || now.Sub(e.since) >= e.linger):
		e.removing, e.confirmed = split(e.confirmed, e.removeMost)
		e.since = now
	case len(e.locked) > 0 && !now.Before(e.lockedAt):
		e.removing, e.locked = split(e.locked, e.removeMost)
	default:
		return nil
	}
	e.removeActive = true
	return entryRefs(e.removing)
}

// split takes up to n of a list from its start.
func split(list []*entry, n int) (taken, rest []*entry) {
	n = min(n, len(list))
	return slices.Clone(list[:n]), slices.Delete(list, 0, n)
}

// worthRemoving reports whether waiting for more confirmed rows is not worth it: there
// are many, or quite a few and none are about to join them.
func (e *engine) worthRemoving() bool {
	return len(e.confirmed) >= e.removeRows || e.inFlight == 0 && len(e.confirmed) >= e.laneRows
}

func (m *entry) ref() outboxstore.Ref {
	return outboxstore.Ref{Lane: m.Lane, ID: m.ID, MessageID: m.MessageID, CreatedAt: m.CreatedAt, CTID: m.ctid}
}

// removed handles the answer to a deletion. A deletion that failed, or whose answer was
// lost, is retried: nothing confirmed is forgotten before it is gone. Reads and other
// lanes go on meanwhile. A failing deletion yields to the others and is retried in
// smaller parts, down to the row that is the cause.
func (e *engine) removed(now time.Time, a removeAnswer) {
	e.removeActive = false
	if a.err != nil {
		e.removeAt = now.Add(a.retryIn)
		if a.lost {
			e.forgetUnsent()
		} else {
			e.splitRemoval(now)
		}
		return
	}
	locked := make(map[rowID]bool, len(a.locked))
	for _, ref := range a.locked {
		locked[rowID{ref.ID, ref.CreatedAt.UnixMicro()}] = true
	}
	again := 0
	for _, m := range e.removing {
		if locked[m.rowID()] {
			m.lane.lockedOut(m)
			e.locked = append(e.locked, m)
			again++
			continue
		}
		m.lane.forget(m)
		m.lane.deleted++
		if m.late || !e.live(m.lane) || now.After(m.lane.trusted) {
			e.settled = append(e.settled, m) // it may have been moved to parked
		}
	}
	switch {
	case again > 0:
		e.lockedAt = now.Add(e.lockedRetry.NextBackOff())
	case len(e.locked) == 0:
		e.lockedRetry.Reset()
	}
	e.removing = nil
	e.removeMost = min(2*e.removeMost, e.removeRows)
}

// splitRemoval moves the rows of a failed deletion behind the others.
func (e *engine) splitRemoval(now time.Time) {
	if m := e.removing[0]; len(e.removing) == 1 {
		m.lane.lockedOut(m)
		e.locked, e.lockedAt = append(e.locked, m), now.Add(e.lockedRetry.NextBackOff())
	} else {
		if len(e.confirmed) == 0 {
			e.since = now
		}
		e.confirmed = append(e.confirmed, e.removing...)
	}
	e.removeMost = max(1, len(e.removing)/2)
	e.removing = nil
}

// removalDue returns when the next deletion may begin; zero: not before an event.
func (e *engine) removalDue(now time.Time) (due time.Time) {
	if e.removeActive {
		return due
	}
	if len(e.confirmed) > 0 {
		due = e.since.Add(e.linger)
	} else if len(e.locked) > 0 {
		due = e.lockedAt
	}
	if len(e.removing) > 0 || !due.IsZero() && due.Before(e.removeAt) {
		due = e.removeAt
	}
	return due
}
