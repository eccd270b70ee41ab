package idempotency

import (
	"context"
	"database/sql"
	"errors"

	"github.com/oncemill/oncemill/internal/sqlitetx"
)

// purgeInTurn changes by text up to limit records that due lists, on SQLite. It stops
// early when others wait for their turn to write, and the caller repeats it. A record
// takes a page or two, or 64 MiB, so time is a better limit than number. Listing needs no
// turn.
func (s *SQLStore) purgeInTurn(ctx context.Context, due, text string, limit int) (changed int64, err error) {
	keys, err := s.keys(ctx, due, limit)
	if err != nil || len(keys) == 0 {
		return 0, err
	}
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		stmt, err := tx.PrepareContext(ctx, text)
		if err != nil {
			return false, err
		}
		defer stmt.Close() //nolint:errcheck // nothing is left to be told
		for _, key := range keys {
			if over() {
				break
			}
			result, err := stmt.ExecContext(ctx, key)
			if err != nil {
				return false, err
			}
			n, err := result.RowsAffected()
			if err != nil {
				return false, err
			}
			changed += n
		}
		return false, nil
	})
	if err != nil {
		return 0, err // it has been rolled back
	}
	return changed, nil
}

// keys lists the hashes of keys.
func (s *SQLStore) keys(ctx context.Context, text string, limit int) (keys [][]byte, err error) {
	rows, err := s.db.QueryContext(ctx, text, limit)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var key []byte
		if err := rows.Scan(&key); err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, rows.Err()
}
