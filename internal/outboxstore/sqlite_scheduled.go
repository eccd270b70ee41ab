package outboxstore

import (
	"context"
	"database/sql"
	"errors"

	"github.com/oncemill/oncemill/internal/shorttx"
)

func (s *sqlite) NextDue(ctx context.Context, _ Passed) (due Due, found bool, err error) {
	var micros int64
	switch err := s.db.QueryRowContext(ctx, s.q.NextDue).Scan(&micros); {
	case errors.Is(err, sql.ErrNoRows):
		return Due{}, false, nil
	case err != nil:
		return Due{}, false, err
	}
	return Due{In: dueIn(micros)}, true, nil
}

func (s *sqlite) NextLarge(context.Context, Passed, int64) (int64, error) { return 0, nil }

// MoveDue moves a few rows at a time, until others wait for their turn to write, nothing
// is due, or there are enough.
func (s *sqlite) MoveDue(ctx context.Context, guard Guard, _ shorttx.Limits, c Choice) (Batch, error) {
	var moved int
	held, err := s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (bool, error) {
		for moved < c.Rows && !over() {
			n, err := s.moveSome(ctx, tx, c.Bytes)
			if err != nil {
				return false, err
			}
			if moved += n; n < sqliteMoveRows {
				break
			}
		}
		return false, nil // the caller calls again
	})
	if err != nil || !held {
		return Batch{}, err
	}
	return Batch{Moved: moved}, nil
}

// sqliteMoveRows is how many rows a statement moves.
const sqliteMoveRows = 200

// moveSome moves the first due rows, and returns how many.
func (s *sqlite) moveSome(ctx context.Context, tx *sql.Tx, bytes int64) (moved int, err error) {
	chosen, err := s.chooseDue(ctx, tx, bytes)
	if err != nil || len(chosen) == 0 {
		return 0, err
	}
	seqs, err := list(chosen)
	if err != nil {
		return 0, err
	}
	for _, text := range []string{s.q.CopyDue, s.q.DeleteDue} {
		if _, err := tx.ExecContext(ctx, text, seqs); err != nil {
			return 0, err
		}
	}
	return len(chosen), nil
}

// chooseDue returns the first due rows, as many as a statement takes.
func (s *sqlite) chooseDue(ctx context.Context, tx *sql.Tx, bytes int64) (chosen []int64, err error) {
	rows, err := tx.QueryContext(ctx, s.q.ChooseDue, sqliteMoveRows)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for total := int64(0); total < bytes && rows.Next(); {
		var seq, size int64
		if err := rows.Scan(&seq, &size); err != nil {
			return nil, err
		}
		chosen = append(chosen, seq)
		total += size
	}
	return chosen, rows.Err()
}
