package inbox

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

const sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

// Safe because SQLite has one writer. Served by the primary keys; the purge also by
// inbox_received and inbox_failures_changed, from their oldest end. The id of a dead
// letter stays.
var sqliteNotes = notesText{
	now: `select ` + sqliteNow,

	reopen: `
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead = 1`,
	markDead: `
update {{inbox}}
set dead = 1
where consumer = $1
	and message_id = $2`,

	noteStart: `
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select 1 from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = ` + sqliteNow + `
returning starts > 1, max(again_at - ` + sqliteNow + `, 0)`,
	noteEnd: `
update {{inbox_failures}}
set starts = max(starts - 1, 0),
	alone = case when $3 then max(alone - 1, 0) else alone end,
	changed_at = ` + sqliteNow + `
where consumer = $1
	and message_id = $2`,
	countFailure: `
insert into {{inbox_failures}} as f (consumer, message_id, failures, unavailable, key, seq)
values ($1, $2, $5, $6, $7, $8)
on conflict (consumer, message_id) do update
set failures = f.failures + excluded.failures,
	unavailable = f.unavailable + excluded.unavailable,
	key = excluded.key,
	seq = excluded.seq,
	starts = case when $3 then max(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then max(f.alone - 1, 0) else f.alone end,
	changed_at = ` + sqliteNow + `
returning failures, unavailable, errors, ` + sqliteNow,

	// Served by the primary key; the row was written by this transaction.
	keepErrors: `
update {{inbox_failures}}
set errors = $3,
	again_at = ` + sqliteNow + ` + $4
where consumer = $1
	and message_id = $2`,

	// Served by inbox_failures_sequence. The key's sequence is locked by this
	// transaction, so none of its messages is handled meanwhile.
	retried: `
select exists (
	select 1
	from {{inbox_failures}} f
	where f.consumer = $1
		and f.key = $2
		and f.seq < $3
		and f.seq > (select s.seq from {{inbox_sequences}} s where s.consumer = $1 and s.key = $2)
		and f.again_at > ` + sqliteNow + ` - $4)`,

	// Served by the primary key. The upsert locks its row, so concurrent counts are made one
	// after the other.
	countRefused: `
insert into {{inbox_refused}} as r (consumer, topic, reason, refused, total)
values ($1, $2, $3, $4, $4)
on conflict (consumer, topic, reason) do update
set refused = excluded.refused + case when r.since < ` + sqliteNow + ` - $5 then 0 else r.refused end,
	since = case when r.since < ` + sqliteNow + ` - $5 then ` + sqliteNow + ` else r.since end,
	total = r.total + excluded.total,
	last_at = ` + sqliteNow + `
returning refused`,

	pruneIDs: `
delete from {{inbox}}
where consumer = $1
	and message_id in (
		select message_id
		from {{inbox}}
		where consumer = $1
			and received_at < ` + sqliteNow + ` - $2
			and dead = 0
		order by received_at
		limit $3)`,
	pruneHandled: `
delete from {{inbox_failures}}
where consumer = $1
	and message_id in (
		select f.message_id
		from {{inbox_failures}} f
		where f.consumer = $1
			and exists (select 1 from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id and not i.dead)
		limit $2)`,
	pruneOld: `
delete from {{inbox_failures}}
where consumer = $1
	and message_id in (
		select message_id
		from {{inbox_failures}}
		where consumer = $1
			and changed_at < ` + sqliteNow + ` - $2
		order by changed_at
		limit $3)`,
}

// The database is a file: a connection to it is not lost.
func (s *sqliteStore) gone(context.Context, *sql.Tx) bool { return false }

// The connection's busy timeout limits the wait for locks.
func (s *sqliteStore) patience(context.Context, *sql.Tx) error { return nil }

func (s *sqliteStore) reopen(ctx context.Context, tx *sql.Tx, id messageID) error {
	_, err := tx.ExecContext(ctx, s.text.reopen, id.consumer, id.message)
	if err != nil && sqlerr.Retryable(err) {
		return fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return err
}
