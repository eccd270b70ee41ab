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

	// Served by the primary key. Two replays of a letter lock its row: one deletes it,
	// the other finds none.
	reopen: `
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead`,

	// Served by the primary key; the row is of this transaction.
	markDead: `
update {{inbox}}
set dead = true
where consumer = $1
	and message_id = $2`,

	// Served by the primary keys. The upsert locks its row, so starts that come at the
	// same time count one after the other.
	noteStart: `
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3::boolean))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = clock_timestamp()
returning starts > 1`,
	noteEnd: `
update {{inbox_failures}}
set starts = greatest(starts - 1, 0),
	alone = case when $3 then greatest(alone - 1, 0) else alone end,
	changed_at = clock_timestamp()
where consumer = $1
	and message_id = $2`,

	// Served by the primary key. The first statement locks the row for the second.
	countFailure: `
insert into {{inbox_failures}} as f (consumer, message_id, failures)
values ($1, $2, 1)
on conflict (consumer, message_id) do update
set failures = f.failures + 1,
	starts = case when $3 then greatest(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then greatest(f.alone - 1, 0) else f.alone end,
	changed_at = clock_timestamp()
returning failures, errors, ` + postgresNow,

	// Served by inbox_received and inbox_failures_changed, from their oldest end.
	// Rows that another pruner has locked are left to it. An id of a dead letter
	// stays.
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

// A connection that is there answers, be it that the transaction is aborted.
func (s *postgresStore) gone(ctx context.Context, tx *sql.Tx) bool {
	_, err := tx.ExecContext(context.WithoutCancel(ctx), `select 1`)
	return sqlerr.Connection(err)
}

const postgresPatience = `select set_config('lock_timeout', $1, true)`

func (s *postgresStore) reopen(ctx context.Context, tx *sql.Tx, id messageID) (bool, error) {
	_, err := tx.ExecContext(ctx, postgresPatience, s.patience)
	if err != nil {
		return false, fmt.Errorf("reopen: %w", err)
	}
	n, err := affected(tx.ExecContext(ctx, s.text.reopen, id.consumer, id.message))
	switch {
	case err == nil:
		return n == 1, nil
	case heldElsewhere(err):
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return false, fmt.Errorf("reopen: %w", err)
}
