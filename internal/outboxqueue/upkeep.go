package outboxqueue

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// Maintain does a part of the upkeep: dead rows of the ring, partitions and retention
// of the history. It calls guard in each transaction before it does anything, to lock
// the caller's lease. If guard returns false, nothing is done. One process at a time
// needs to call it, every few seconds; concurrent calls are safe.
func (q *Queue) Maintain(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (done outboxstore.Maintained, err error) {
	err = q.maintainRing(ctx, guard, &done)
	if err == nil || !inconclusive(ctx, err) {
		err = errors.Join(err, q.maintainHistory(ctx, guard, &done))
	}
	return done, err
}

// LastIDSeen returns the last id that the outbox had given out when Maintain looked at the
// ring; 0 if it never has.
func (q *Queue) LastIDSeen() int64 { return q.lastID.Load() }

// daysAhead is how many days get their partition of the history early.
const daysAhead = 3

// maintainHistory creates the partitions of today and the days ahead, and empties those
// past their retention. It drops them a day later, when no reader remembers them. Rows
// to be archived are removed once they have been archived.
func (q *Queue) maintainHistory(ctx context.Context, guard outboxstore.Guard, done *outboxstore.Maintained) error {
	missing, days, err := q.store.HistoryDays(ctx, daysAhead)
	if err != nil {
		return fmt.Errorf("look at the history: %w", err)
	}
	var failed error
	if q.retention > 0 {
		if err := q.addDays(ctx, guard, missing, done); err != nil {
			failed = fmt.Errorf("make partition of the history: %w", err)
		}
	}
	archived := q.Archives()
	for _, day := range days {
		// Without a history, nothing has to be kept after the end of the day.
		how := outboxstore.Retiring{Drop: day.Past-q.retention > 24*time.Hour, Empty: archived}
		if !how.Drop && (day.Past <= q.retention || !day.Filled) {
			continue
		}
		retired, err := q.store.RetireHistoryDay(ctx, guard, day.Name, how)
		switch {
		case retired:
			done.Retired++
		case err != nil && !notNow(ctx, err):
			return errors.Join(failed, fmt.Errorf("retire partition of the history: %w", err))
		}
	}
	if archived {
		return failed
	}
	purged, err := q.store.PurgeHistory(ctx, guard, q.retention)
	done.Retired += purged
	if err != nil {
		return errors.Join(failed, fmt.Errorf("purge the history: %w", err))
	}
	return failed
}

func (q *Queue) addDays(ctx context.Context, guard outboxstore.Guard, missing []string, done *outboxstore.Maintained) error {
	for _, day := range missing {
		added, err := q.store.AddHistoryDay(ctx, guard, day)
		switch {
		case added:
			done.Made++
		case err != nil && !notNow(ctx, err):
			return err
		}
	}
	return nil
}
