package outboxstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlitetx"
)

const (
	sqliteHistoryRow = ` h.lane, h.id, h.topic, h.message_id, h.key, h.payload, h.metadata, h.created_at, h.relayed_at`

	sqliteHistoryWhere = `
	(?1 is null or h.id in (select value from json_each(?1)))
	and (?2 is null or h.message_id in (select value from json_each(?2)))
	and (?3 = '' or h.key = ?3)
	and (?4 = '' or h.topic = ?4)
	and h.relayed_at >= ?5
	and h.relayed_at < ?6`

	// Served by the index on time, and sorted.
	sqliteListHistory = `
select` + sqliteHistoryRow + `
from {{outbox_history}} h
where` + sqliteHistoryWhere + `
	and (h.id, h.relayed_at) > (?7, ?8)
order by h.id, h.relayed_at
limit ?9`

	sqliteCountHistory = `
select count(*)
from (
	select distinct h.message_id, h.topic
	from {{outbox_history}} h
	where` + sqliteHistoryWhere + `
)`

	sqliteResend = `
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata, created_at)
select lane, topic, message_id, key, payload, metadata, created_at
from (
	select h.*, row_number() over (partition by h.message_id, h.topic order by h.id, h.relayed_at) as n
	from {{outbox_history}} h
	where` + sqliteHistoryWhere + `
)
where n = 1
order by id, relayed_at
limit ?7`
)

func sqliteHistoryArgs(f HistoryFilter) ([]any, error) {
	args := []any{nil, nil, f.Key, f.Topic, int64(0), int64(1) << 62}
	for i, list := range []any{f.IDs, f.MessageIDs} {
		if i == 0 && len(f.IDs) == 0 || i == 1 && len(f.MessageIDs) == 0 {
			continue
		}
		text, err := json.Marshal(list)
		if err != nil {
			return nil, err
		}
		args[i] = string(text)
	}
	if !f.From.IsZero() {
		args[4] = f.From.UnixMicro()
	}
	if !f.To.IsZero() {
		args[5] = f.To.UnixMicro()
	}
	return args, nil
}

func (s *sqliteStore) ListHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error) {
	args, err := sqliteHistoryArgs(f)
	if err != nil {
		return nil, err
	}
	relayed := int64(0)
	if f.After.ID > 0 {
		relayed = f.After.RelayedAt.UnixMicro()
	}
	return scanHistory(s.db.QueryContext(ctx, s.names.Expand(sqliteListHistory), append(args, f.After.ID, relayed, f.Limit)...))
}

func (s *sqliteStore) CountHistory(ctx context.Context, f HistoryFilter) (n int, err error) {
	args, err := sqliteHistoryArgs(f)
	if err != nil {
		return 0, err
	}
	err = s.db.QueryRowContext(ctx, s.names.Expand(sqliteCountHistory), args...).Scan(&n)
	return n, err
}

func (s *sqliteStore) Resend(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (int64, error) {
	args, err := sqliteHistoryArgs(f)
	if err != nil {
		return 0, err
	}
	return affected(tx.ExecContext(ctx, s.names.Expand(sqliteResend), append(args, f.Limit)...))
}

const (
	// Served by the index on relayed_at.
	sqliteExpired = `
select exists (select 1 from {{outbox_history}} where relayed_at < ` + sqliteNow + ` - ?1)`

	// Served by the index on relayed_at.
	sqliteArchiveRead = `
select h.rowid,` + sqliteHistoryRow + `
from {{outbox_history}} h
where h.relayed_at < ` + sqliteNow + ` - ?1
order by h.relayed_at
limit ?2`

	// A rowid may have been given out again.
	sqliteArchiveDelete = `
delete from {{outbox_history}}
where rowid = ?1 and id = ?2 and message_id = ?3 and relayed_at = ?4`
)

func (s *sqliteStore) Expired(ctx context.Context, guard Guard, _ Expired) (Expired, error) {
	batch, err := s.oldest(ctx)
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
func (s *sqliteStore) oldest(ctx context.Context) (batch Expired, err error) {
	rows, err := s.db.QueryContext(ctx, s.names.Expand(sqliteArchiveRead), s.history.Microseconds(), archiveRows)
	if err != nil {
		return Expired{}, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for bytes := 0; rows.Next() && bytes < archiveBytes; {
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

func (s *sqliteStore) Forget(ctx context.Context, guard Guard, batch Expired) (bool, error) {
	left := batch
	return s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		remove, err := tx.PrepareContext(ctx, s.names.Expand(sqliteArchiveDelete))
		if err != nil {
			return false, err
		}
		defer remove.Close() //nolint:errcheck // nothing is left to be told
		for ; len(left.Rows) > 0 && !over(); left.Rows, left.rowids = left.Rows[1:], left.rowids[1:] {
			r := left.Rows[0]
			if _, err := remove.ExecContext(ctx, left.rowids[0], r.ID, r.MessageID, r.RelayedAt.UnixMicro()); err != nil {
				return false, err
			}
		}
		return len(left.Rows) > 0, nil
	})
}

// guarded runs fn like [sqlitetx.WriteSlices], in transactions that the caller's lease
// guards, and reports whether the lease was held.
func (s *sqliteStore) guarded(ctx context.Context, guard Guard, fn func(tx *sql.Tx, over func() bool) (more bool, err error)) (held bool, err error) {
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		if held, err = guard(ctx, tx); err != nil || !held {
			return false, err
		}
		return fn(tx, over)
	})
	return held && err == nil, err
}
