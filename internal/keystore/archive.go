package keystore

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
)

// archiveTexts are the statements for what is archived before it is purged.
type archiveTexts struct{ DueKeys, DueKey, DeleteDue string }

// Due implements [Store].
func (s *postgres) Due(ctx context.Context, limit int) ([]Summary, error) {
	return summaries(ctx, s.db, s.q.DueKeys, limit)
}

// Due implements [Store].
func (s *sqlite) Due(ctx context.Context, limit int) ([]Summary, error) {
	return summaries(ctx, s.db, s.q.DueKeys, limit)
}

// DueWithin implements [Store].
func (s *postgres) DueWithin(ctx context.Context, id ID, within time.Duration) (bool, error) {
	return due(s.db.QueryRowContext(ctx, s.q.DueKey, id[:], within.Microseconds()))
}

// DueWithin implements [Store].
func (s *sqlite) DueWithin(ctx context.Context, id ID, within time.Duration) (bool, error) {
	return due(s.db.QueryRowContext(ctx, s.q.DueKey, id[:], within.Microseconds()))
}

func due(row *sql.Row) (due bool, err error) {
	if err = row.Scan(&due); errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return due, err
}

// DeleteDue implements [Store].
func (s *postgres) DeleteDue(ctx context.Context, records []Summary) (deleted int, err error) {
	keys, owners := make([][]byte, len(records)), make([][]byte, len(records))
	for i := range records {
		keys[i], owners[i] = records[i].ID[:], records[i].Owner.Token[:]
	}
	err = s.single(ctx, func(via session) error {
		n, err := database.Affected(via.ExecContext(ctx, s.q.DeleteDue, pq.Array(keys), pq.Array(owners)))
		deleted = int(n)
		return err
	})
	return deleted, err
}

// DeleteDue implements [Store].
func (s *sqlite) DeleteDue(ctx context.Context, records []Summary) (deleted int, err error) {
	next := 0
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		for ; next < len(records); next++ {
			if over() {
				return true, nil
			}
			n, err := database.Affected(tx.ExecContext(ctx, s.q.DeleteDue, records[next].ID[:], records[next].Owner.Token[:]))
			if err != nil {
				return false, err
			}
			deleted += int(n)
		}
		return false, nil
	})
	return deleted, err
}

// Expire implements [Store].
func (s *postgres) Expire(ctx context.Context, limit int) (int, error) {
	n, err := s.change(ctx, s.q.Expire, limit)
	return int(n), err
}

// Expire implements [Store].
func (s *sqlite) Expire(ctx context.Context, limit int) (int, error) {
	return s.purge(ctx, s.q.Expired, s.q.Expire, limit)
}
