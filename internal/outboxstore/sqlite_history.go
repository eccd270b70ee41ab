package outboxstore

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
)

// sqliteArgs returns the parameters of the conditions.
func (f HistoryFilter) sqliteArgs() ([]any, error) {
	args := []any{nil, nil, f.Key, f.Topic, int64(0), int64(1) << 62}
	if len(f.IDs) > 0 {
		ids, err := list(f.IDs)
		if err != nil {
			return nil, err
		}
		args[0] = ids
	}
	if len(f.MessageIDs) > 0 {
		messageIDs, err := list(f.MessageIDs)
		if err != nil {
			return nil, err
		}
		args[1] = messageIDs
	}
	if !f.From.IsZero() {
		args[4] = f.From.UnixMicro()
	}
	if !f.To.IsZero() {
		args[5] = f.To.UnixMicro()
	}
	return args, nil
}

func (s *sqlite) Now(ctx context.Context) (time.Time, error) {
	var micros int64
	err := s.db.QueryRowContext(ctx, s.q.Now).Scan(&micros)
	return time.UnixMicro(micros), err
}

func (s *sqlite) ListHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error) {
	args, err := f.sqliteArgs()
	if err != nil {
		return nil, err
	}
	relayed := int64(0)
	if f.After.ID > 0 {
		relayed = f.After.RelayedAt.UnixMicro()
	}
	return scanHistory(s.db.QueryContext(ctx, s.q.ListHistory, append(args, f.After.ID, relayed, f.Limit, f.Brief)...))
}

func (s *sqlite) CountHistory(ctx context.Context, f HistoryFilter) (n int, err error) {
	args, err := f.sqliteArgs()
	if err != nil {
		return 0, err
	}
	err = s.db.QueryRowContext(ctx, s.q.CountHistory, args...).Scan(&n)
	return n, err
}

func (s *sqlite) Resend(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (int64, error) {
	args, err := f.sqliteArgs()
	if err != nil {
		return 0, err
	}
	return database.Affected(tx.ExecContext(ctx, s.q.Resend, append(args, f.Limit)...))
}

const (
	purgeRows  = 200
	purgeBytes = 4 << 20
)

// PurgeHistory looks first: reading needs no turn.
func (s *sqlite) PurgeHistory(ctx context.Context, guard Guard, retention time.Duration) (purged int64, err error) {
	var expired bool
	if err := s.db.QueryRowContext(ctx, s.q.HasExpired, retention.Microseconds()).Scan(&expired); err != nil || !expired {
		return 0, err
	}
	_, err = s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		for !over() {
			n, err := database.Affected(tx.ExecContext(ctx, s.q.Purge, retention.Microseconds(), purgeRows, purgeBytes))
			if err != nil {
				return false, err
			}
			if purged += n; n == 0 {
				return false, nil
			}
		}
		return true, nil
	})
	return purged, err
}

func (s *sqlite) Expired(ctx context.Context, guard Guard, _ Expired, limits ExpiredLimits) (Expired, error) {
	batch, err := s.oldest(ctx, limits)
	if err != nil || len(batch.Rows) == 0 {
		return Expired{}, err
	}
	held, err := s.guarded(ctx, guard, func(*sql.Tx, func() bool) (bool, error) { return false, nil })
	if err != nil || !held {
		return Expired{}, err
	}
	return batch, nil
}

// oldest reads the oldest rows past their retention.
func (s *sqlite) oldest(ctx context.Context, limits ExpiredLimits) (batch Expired, err error) {
	rows, err := s.db.QueryContext(ctx, s.q.ArchiveRead, limits.Retention.Microseconds(), limits.Rows)
	if err != nil {
		return Expired{}, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for bytes := 0; bytes < limits.Bytes && rows.Next(); {
		var rowid, created, relayed int64
		var r HistoryRow
		if err := rows.Scan(&rowid, &r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Payload, &r.Metadata, &created, &relayed); err != nil {
			return Expired{}, err
		}
		r.CreatedAt, r.RelayedAt = time.UnixMicro(created).UTC(), time.UnixMicro(relayed).UTC()
		batch.rowids, batch.Rows = append(batch.rowids, rowid), append(batch.Rows, r)
		bytes += len(r.Payload) + len(r.Metadata)
	}
	return batch, rows.Err()
}

func (s *sqlite) DeleteExpired(ctx context.Context, guard Guard, batch Expired) (bool, error) {
	left := batch
	return s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		remove, err := tx.PrepareContext(ctx, s.q.ArchiveDelete)
		if err != nil {
			return false, err
		}
		defer remove.Close() //nolint:errcheck // the transaction is over
		for ; len(left.Rows) > 0 && !over(); left.Rows, left.rowids = left.Rows[1:], left.rowids[1:] {
			r := left.Rows[0]
			if _, err := remove.ExecContext(ctx, left.rowids[0], r.ID, r.MessageID, r.RelayedAt.UnixMicro()); err != nil {
				return false, err
			}
		}
		return len(left.Rows) > 0, nil
	})
}
