package inbox

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

const postgresNow = `(extract(epoch from clock_timestamp()) * 1000000)::bigint`

var postgresNotes = notesText{
	now: `select ` + postgresNow,

	// Served by the primary key. Two replays of a dead letter lock its row: one deletes it,
	// the other finds none.
	reopen: `
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead`,

	// Served by the primary key; the row was written by this transaction.
	markDead: `
update {{inbox}}
set dead = true
where consumer = $1
	and message_id = $2`,

	// Served by the primary keys. The upsert locks its row, so concurrent starts are counted
	// one after the other.
	noteStart: `
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3::boolean))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = clock_timestamp()
returning starts > 1, greatest((extract(epoch from f.again_at - clock_timestamp()) * 1000000)::bigint, 0)`,
	noteEnd: `
update {{inbox_failures}}
set starts = greatest(starts - 1, 0),
	alone = case when $3 then greatest(alone - 1, 0) else alone end,
	changed_at = clock_timestamp()
where consumer = $1
	and message_id = $2`,

	// Served by the primary key. The first statement locks the row for the second.
	countFailure: `
insert into {{inbox_failures}} as f (consumer, message_id, failures, unavailable, key, seq)
values ($1, $2, $5::integer, $6::integer, $7, $8::bigint)
on conflict (consumer, message_id) do update
set failures = f.failures + excluded.failures,
	unavailable = f.unavailable + excluded.unavailable,
	key = excluded.key,
	seq = excluded.seq,
	starts = case when $3 then greatest(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then greatest(f.alone - 1, 0) else f.alone end,
	changed_at = clock_timestamp()
returning failures, unavailable, errors, ` + postgresNow,

	// Served by the primary key; the row was written by this transaction.
	keepErrors: `
update {{inbox_failures}}
set errors = $3,
	again_at = clock_timestamp() + $4::bigint * interval '1 microsecond'
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
		and f.again_at > clock_timestamp() - $4::bigint * interval '1 microsecond')`,

	// Served by the primary key. The upsert locks its row, so concurrent counts are made one
	// after the other.
	countRefused: `
insert into {{inbox_refused}} as r (consumer, topic, reason, refused, total)
values ($1, $2, $3, $4::bigint, $4::bigint)
on conflict (consumer, topic, reason) do update
set refused = excluded.refused + case when r.since < clock_timestamp() - $5::bigint * interval '1 microsecond' then 0 else r.refused end,
	since = case when r.since < clock_timestamp() - $5::bigint * interval '1 microsecond' then clock_timestamp() else r.since end,
	total = r.total + excluded.total,
	last_at = clock_timestamp()
returning refused`,

	// Served by inbox_received and inbox_failures_changed, from their oldest end. Rows that
	// another purge has locked are left to it. The id of a dead letter stays.
	pruneIDs: `
delete from {{inbox}}
where ctid = any (array(
	select ctid
	from {{inbox}}
	where consumer = $1
		and received_at < clock_timestamp() - $2::bigint * interval '1 microsecond'
		and not dead
	order by received_at
	limit $3
	for update skip locked))`,
	pruneHandled: `
delete from {{inbox_failures}}
where ctid = any (array(
	select f.ctid
	from {{inbox_failures}} f
	where f.consumer = $1
		and exists (select from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id and not i.dead)
	limit $2
	for update of f skip locked))`,
	pruneOld: `
delete from {{inbox_failures}}
where ctid = any (array(
	select ctid
	from {{inbox_failures}}
	where consumer = $1
		and changed_at < clock_timestamp() - $2::bigint * interval '1 microsecond'
	order by changed_at
	limit $3
	for update skip locked))`,
}

// A live connection answers, even if the transaction is aborted.
func (s *postgresStore) gone(ctx context.Context, tx *sql.Tx) bool {
	_, err := tx.ExecContext(context.WithoutCancel(ctx), `select 1`)
	return sqlerr.Connection(err)
}

const postgresPatience = `
select
	set_config('oncemill.lock_timeout', current_setting('lock_timeout'), true),
	set_config('lock_timeout', $1, true),
	case current_setting('idle_in_transaction_session_timeout')
		when '0' then set_config('idle_in_transaction_session_timeout', $2, true)
	end`

// The claim, which follows, restores the previous value.
func (s *postgresStore) patience(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, postgresPatience, s.wait, s.idle)
	return err
}

func (s *postgresStore) reopen(ctx context.Context, tx *sql.Tx, id messageID) error {
	_, err := tx.ExecContext(ctx, s.text.reopen, id.consumer, id.message)
	if err != nil && heldElsewhere(err) {
		return fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return err
}
