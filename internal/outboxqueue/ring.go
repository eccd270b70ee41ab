package outboxqueue

import (
	"context"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/outbox"
)

const (
	// Reads pass over this many bytes of dead rows in less than a millisecond, so a
	// truncation gains nothing.
	worthTruncating = 8 << 20

	// Truncating this much is worthwhile once reads have passed over it many times.
	worthWhereSlow = 1 << 20
)

// maintainRing truncates the partitions that hold only dead rows, and turns the ring
// when that is worthwhile.
func (q *Queue) maintainRing(ctx context.Context, guard outboxstore.Guard, done *outboxstore.Maintained) error {
	truncate := q.box.Config().Truncate
	if truncate == outbox.TruncateNever {
		return nil
	}
	ring, err := q.store.Ring(ctx)
	if err != nil {
		return fmt.Errorf("look at the ring: %w", err)
	}
	q.lastID.Store(ring.Last)
	slow := q.deadScans.slow(ring)
	dirty := func(i int, p outboxstore.Partition) bool {
		return p.Bytes >= worthTruncating || p.Bytes >= worthWhereSlow && slow[i]
	}
	gains := false
	for i, p := range ring.Partitions {
		gains = gains || dirty(i, p)
	}
	if gains && truncate == outbox.TruncateAuto {
		standby, err := q.store.HasStandby(ctx)
		if err != nil {
			return fmt.Errorf("look for standbys: %w", err)
		}
		gains = !standby
	}
	if !gains {
		q.locks.allFree()
		return nil
	}
	writing, clean := outboxstore.PartitionOf(ring.Last), true // clean: all except the partition being written
	for i, p := range ring.Partitions {
		// The partition being written is not empty for long. The one that comes next
		// must be cleaned before its turn, so it is not skipped.
		if i == writing || !dirty(i, p) {
			q.locks.free(i)
			clean = clean && (i == writing || p.Bytes < worthWhereSlow)
			continue
		}
		emptied, blocked, err := q.truncate(ctx, guard, i)
		switch {
		case err != nil:
			return fmt.Errorf("truncate partition %d of the ring: %w", i, err)
		case emptied:
			done.Truncated++
		case blocked:
			done.Blocked++
			done.Again = max(done.Again, q.locks.pause(i, time.Now()))
		}
		clean = clean && emptied
	}
	// While another partition holds rows, turning would spread a backlog over the whole
	// ring, and nothing could be truncated.
	if !slow[writing] || !clean || ring.Partitions[writing].Bytes < worthWhereSlow {
		return nil
	}
	turned, err := q.store.AdvanceIDs(ctx, guard)
	switch {
	case turned:
		done.Turned++
		done.Again = soonest
	case err != nil && !notNow(ctx, err):
		return fmt.Errorf("turn the ring: %w", err)
	}
	return nil
}

// truncate removes the dead rows of a partition of the ring, unless it has other rows
// or somebody's lock blocks that.
func (q *Queue) truncate(ctx context.Context, guard outboxstore.Guard, i int) (emptied, blocked bool, err error) {
	wait, ok := q.locks.may(i, time.Now())
	if !ok {
		return false, true, nil
	}
	limits := shorttx.Limits{Lock: wait, Statement: statementWaits * wait}
	emptied, err = q.store.TruncatePartition(ctx, guard, limits, i)
	switch {
	case emptied:
		q.locks.granted(i)
		return true, false, nil
	case err == nil || !notNow(ctx, err):
		q.locks.free(i)
		return false, false, err
	}
	lockers, err := q.store.PartitionLockers(ctx, i)
	if err != nil {
		return false, true, err
	}
	q.locks.refused(i, time.Now(), lockers)
	return false, true, nil
}

// Backlog describes what waits; at most so many rows of each lane are counted.
func (q *Queue) Backlog(ctx context.Context, most int) (outboxstore.Backlog, error) {
	b, err := q.store.Backlog(ctx, most)
	if err != nil {
		return b, fmt.Errorf("count what waits: %w", err)
	}
	return b, nil
}

// Held finds what keeps dead rows in the tables. It runs several statements on system
// views: call it every few seconds at most. A role without pg_read_all_stats does not
// see the age of other roles' transactions. On SQLite it is empty.
func (q *Queue) Held(ctx context.Context) (held outboxstore.Held, err error) {
	if held.Oldest, err = q.store.OldestSnapshot(ctx); err != nil {
		return outboxstore.Held{}, fmt.Errorf("look for old snapshots: %w", err)
	}
	if !q.locks.blocked() {
		return held, nil
	}
	if held.Blocked, err = q.store.RingLockers(ctx); err != nil {
		return outboxstore.Held{}, fmt.Errorf("look for locks on the ring: %w", err)
	}
	return held, nil
}
