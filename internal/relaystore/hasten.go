package relaystore

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/database"
)

// Hasten makes retrying messages due, for an operator.
type Hasten interface {
	// RetryNow makes retrying messages of a lane due that are not yet, and returns how many, at
	// most the given number.
	RetryNow(ctx context.Context, f Fence, what Hastening, most int) (int, error)
}

// Hastening is what an operator wants to have tried now.
type Hastening struct {
	Topic, Key string    // empty: all
	Asked      time.Time // by the database's clock: what has failed since then waits as usual
}

// RetryNow implements [Hasten].
func (s *postgres) RetryNow(ctx context.Context, f Fence, what Hastening, most int) (hastened int, err error) {
	err = s.within(ctx, func(tx *sql.Tx) error {
		var holds int
		query, args := s.q.RetryNow, []any{f.Lane, f.Owner, f.Epoch, what.Topic, most, what.Asked.UnixMicro()}
		if what.Key != "" {
			query, args = s.q.RetryKeyNow, append(args, what.Key)
		}
		if err := tx.QueryRowContext(ctx, query, args...).Scan(&holds, &hastened); err != nil {
			return err
		}
		if holds == 0 {
			return ErrFenced
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("retry now: %w", err)
	}
	return hastened, nil
}

// RetryNow implements [Hasten].
func (s *sqlite) RetryNow(ctx context.Context, f Fence, what Hastening, most int) (hastened int, err error) {
	err = s.fenced(ctx, f, func(tx *sql.Tx, _ touchedKeys, _ func() bool) (bool, error) {
		query, args := s.q.RetryNow, []any{f.Lane, what.Topic, most, what.Asked.UnixMicro()}
		if what.Key != "" {
			query, args = s.q.RetryKeyNow, append(args, what.Key)
		}
		n, err := database.Affected(tx.ExecContext(ctx, query, args...))
		hastened = int(n)
		return false, err
	})
	if err != nil {
		return 0, fmt.Errorf("retry now: %w", err)
	}
	return hastened, nil
}
