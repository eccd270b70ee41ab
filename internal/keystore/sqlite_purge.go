package keystore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
)

// Purge implements [Store]. A record takes a page or two, or 64 MiB, so the time of a turn
// is a better limit than the number. Listing needs no turn.
func (s *sqlite) Purge(ctx context.Context, limit int) (total int, err error) {
	for _, part := range []struct{ due, change string }{{s.q.Purgeable, s.q.Purge}, {s.q.Expired, s.q.Expire}} {
		n, err := s.purge(ctx, part.due, part.change, limit)
		total += n
		if err != nil {
			return total, fmt.Errorf("purge: %w", err)
		}
	}
	return total, nil
}

// purge executes change for each of up to limit records that due lists, in one turn.
func (s *sqlite) purge(ctx context.Context, due, change string, limit int) (n int, err error) {
	keys, err := s.keys(ctx, due, limit)
	if err != nil || len(keys) == 0 {
		return 0, err
	}
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		stmt, err := tx.PrepareContext(ctx, change)
		if err != nil {
			return false, err
		}
		defer stmt.Close() //nolint:errcheck // the transaction reports what goes wrong
		for _, key := range keys {
			if over() {
				break
			}
			changed, err := database.Affected(stmt.ExecContext(ctx, key))
			if err != nil {
				return false, err
			}
			n += int(changed)
		}
		return false, nil
	})
	if err != nil {
		return 0, err // it has been rolled back
	}
	return n, nil
}

// keys lists the hashes of keys.
func (s *sqlite) keys(ctx context.Context, text string, limit int) (keys [][]byte, err error) {
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
