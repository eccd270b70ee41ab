package outboxstore

import (
	"context"
	"database/sql"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
)

// postgresHistory is the SQL of the delivered messages.
type postgresHistory struct{ list, count, resend string }

func newPostgresHistory(names database.Database) postgresHistory {
	return postgresHistory{
		list: names.Expand(postgresListHistory), count: names.Expand(postgresCountHistory), resend: names.Expand(postgresResend),
	}
}

const (
	postgresHistoryRow = `
	h.lane, h.id, h.topic, h.message_id, h.key, h.payload, h.metadata,
	(date_part('epoch', h.created_at) * 1000000)::bigint, (date_part('epoch', h.relayed_at) * 1000000)::bigint`

	// Planned for its parameters at each execution. A condition that is not set thus
	// disappears before a plan is chosen, and times select the days.
	postgresHistoryWhere = `
	($1::bigint[] is null or h.id = any ($1::bigint[]))
	and ($2::text[] is null or h.message_id = any ($2::text[]))
	and ($3::text = '' or h.key = $3::text)
	and ($4::text = '' or h.topic = $4::text)
	and ($5::timestamptz is null or h.relayed_at >= $5::timestamptz)
	and ($6::timestamptz is null or h.relayed_at < $6::timestamptz)`

	// Served by the index on id of each day, merged: a page reads from where the
	// previous one ended. Rows added meanwhile may have any id; a page shows its
	// snapshot.
	postgresListHistory = `
select` + postgresHistoryRow + `
from {{outbox_history}} h
where` + postgresHistoryWhere + `
	and ($7::bigint = 0 or h.id >= $7::bigint and (h.id, h.relayed_at) > ($7::bigint, $8::timestamptz))
order by h.id, h.relayed_at
limit $9`

	postgresCountHistory = `
select count(*)
from (
	select distinct h.message_id, h.topic
	from {{outbox_history}} h
	where` + postgresHistoryWhere + `
) m`

	// Ids are taken after the sort. The rows stay in the history: what is inserted is a
	// copy, so two concurrent calls only send twice.
	postgresResend = `
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata, created_at)
select lane, topic, message_id, key, payload, metadata, created_at
from (
	select distinct on (h.message_id, h.topic) h.*
	from {{outbox_history}} h
	where` + postgresHistoryWhere + `
	order by h.message_id, h.topic, h.id, h.relayed_at
) first
order by id, relayed_at
limit $7`
)

// historyArgs are the parameters of the conditions.
func historyArgs(f HistoryFilter) []any {
	args := []any{nil, nil, f.Key, f.Topic, timeOrNull(f.From), timeOrNull(f.To)}
	if len(f.IDs) > 0 {
		args[0] = pq.Array(f.IDs)
	}
	if len(f.MessageIDs) > 0 {
		args[1] = pq.Array(f.MessageIDs)
	}
	return args
}

func timeOrNull(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t
}

func (s *postgresStore) ListHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error) {
	args := append(historyArgs(f), f.After.ID, timeOrNull(f.After.RelayedAt), f.Limit)
	return scanHistory(s.db.QueryContext(ctx, s.past.list, args...))
}

func (s *postgresStore) CountHistory(ctx context.Context, f HistoryFilter) (n int, err error) {
	err = s.db.QueryRowContext(ctx, s.past.count, historyArgs(f)...).Scan(&n)
	return n, err
}

func (s *postgresStore) Resend(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (int64, error) {
	return affected(tx.ExecContext(ctx, s.past.resend, append(historyArgs(f), f.Limit)...))
}

const (
	// Served by the index on id of the day. $1 is the last id of the previous batch,
	// behind entries of deleted rows that vacuum has not removed yet; $2 the number of
	// rows, $3 the byte budget.
	postgresArchiveRead = `
select` + postgresHistoryRow + `
from (
	select f.*,
		sum(octet_length(f.payload) + octet_length(f.metadata))
			over (order by f.id rows between unbounded preceding and 1 preceding) as bytes_before
	from (select * from {{day}} where id > $1 order by id limit $2) f
) h
where coalesce(h.bytes_before, 0) < $3
order by h.id`

	// Only other archivers write to a day that is past its retention.
	postgresArchiveDelete = `
delete from {{day}} h
using unnest((select $1::bigint[]), (select $2::text[]), (select $3::bigint[])) as c (id, message_id, relayed_micros)
where h.id = c.id
	and h.message_id = c.message_id
	and h.relayed_at = timestamptz 'epoch' + c.relayed_micros * interval '1 microsecond'`
)

var archiveLimits = shorttx.Limits{Lock: time.Second, Statement: 4 * time.Second}

func (s *postgresStore) Expired(ctx context.Context, guard Guard, behind Expired) (Expired, error) {
	now, days, err := s.historyDays(ctx)
	if err != nil {
		return Expired{}, err
	}
	for _, name := range slices.Sorted(maps.Keys(days)) {
		day, err := time.Parse(dayLayout, name)
		if err != nil || !days[name] || s.expiredFor(now, day) <= 0 || name < behind.day {
			continue // not one of ours, empty, still kept, or done
		}
		after := int64(math.MinInt64)
		if name == behind.day {
			after = behind.Rows[len(behind.Rows)-1].ID
		}
		read := strings.ReplaceAll(postgresArchiveRead, "{{day}}", s.upkeep.dayTable(name))
		rows, err := scanHistory(s.db.QueryContext(ctx, read, after, archiveRows, archiveBytes))
		if err != nil {
			return Expired{}, err
		}
		if len(rows) == 0 {
			continue
		}
		held, err := s.guarded(ctx, archiveLimits, guard, func(*sql.Tx) (bool, error) { return true, nil })
		if err != nil || !held {
			return Expired{}, err
		}
		return Expired{Rows: rows, day: name}, nil
	}
	return Expired{}, nil
}

func (s *postgresStore) Forget(ctx context.Context, guard Guard, batch Expired) (bool, error) {
	remove := strings.ReplaceAll(postgresArchiveDelete, "{{day}}", s.upkeep.dayTable(batch.day))
	return s.guarded(ctx, archiveLimits, guard, func(tx *sql.Tx) (bool, error) {
		_, err := tx.ExecContext(ctx, remove, archivedArgs(batch.Rows)...)
		return true, err
	})
}

func archivedArgs(rows []HistoryRow) []any {
	ids, messageIDs, times := make([]int64, len(rows)), make([]string, len(rows)), make([]int64, len(rows))
	for i, r := range rows {
		ids[i], messageIDs[i], times[i] = r.ID, r.MessageID, r.RelayedAt.UnixMicro()
	}
	return []any{pq.Array(ids), pq.Array(messageIDs), pq.Array(times)}
}
