package keystore

import (
	"context"
	"database/sql"
	"time"
)

// StartedCount is a number of claims that have not ended.
type StartedCount struct {
	Endpoint string
	Running  bool // their leases have not ended either
	N        int64
	Oldest   time.Duration // its age
}

// CountStarted implements [Store].
func (s *postgres) CountStarted(ctx context.Context, most int) ([]StartedCount, error) {
	return countStarted(ctx, s.db, s.q.CountStarted, most)
}

// CountStarted implements [Store].
func (s *sqlite) CountStarted(ctx context.Context, most int) ([]StartedCount, error) {
	return countStarted(ctx, s.db, s.q.CountStarted, most)
}

func countStarted(ctx context.Context, db *sql.DB, text string, most int) (counts []StartedCount, err error) {
	rows, err := db.QueryContext(ctx, text, most)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var c StartedCount
		var age int64
		if err := rows.Scan(&c.Endpoint, &c.Running, &c.N, &age); err != nil {
			return nil, err
		}
		c.Oldest = time.Duration(age) * time.Microsecond
		counts = append(counts, c)
	}
	return counts, rows.Err()
}

// CountStored implements [Store].
func (s *postgres) CountStored(ctx context.Context, _ int) (n int64, estimated bool, err error) {
	err = s.db.QueryRowContext(ctx, s.q.Estimate).Scan(&n)
	return n, true, err
}

// CountStored implements [Store].
func (s *sqlite) CountStored(ctx context.Context, most int) (n int64, estimated bool, err error) {
	err = s.db.QueryRowContext(ctx, s.q.CountStored, most).Scan(&n)
	return n, false, err
}
