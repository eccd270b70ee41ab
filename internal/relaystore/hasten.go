package relaystore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill/internal/database"
)

// Hasten makes retrying messages due, for an operator.
type Hasten interface {
	// RetryNow makes retrying messages of a lane due that are not yet: of a topic and a key, of
	// all if these are empty. It returns how many, at most the given number.
	RetryNow(ctx context.Context, f Fence, topic, key string, most int) (int, error)
}

// RetryNow implements [Hasten].
func (s *postgres) RetryNow(ctx context.Context, f Fence, topic, key string, most int) (hastened int, err error) {
	err = s.within(ctx, func(tx *sql.Tx) error {
		var holds int
		query, args := s.q.RetryNow, []any{f.Lane, f.Owner, f.Epoch, topic, most}
		if key != "" {
			query, args = s.q.RetryKeyNow, append(args, key)
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
func (s *sqlite) RetryNow(ctx context.Context, f Fence, topic, key string, most int) (hastened int, err error) {
	err = s.fenced(ctx, f, func(tx *sql.Tx, _ touchedKeys, _ func() bool) (bool, error) {
		query, args := s.q.RetryNow, []any{f.Lane, topic, most}
		if key != "" {
			query, args = s.q.RetryKeyNow, append(args, key)
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
