package inbox

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

const sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

// There is one writer: that is why all of it is safe. Served by the primary keys, the
// pruning by inbox_received and inbox_failures_changed too, from their oldest end; an id
// of a dead letter stays.
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
returning starts > 1`,
	noteEnd: `
update {{inbox_failures}}
set starts = max(starts - 1, 0),
	alone = case when $3 then max(alone - 1, 0) else alone end,
	changed_at = ` + sqliteNow + `
where consumer = $1
	and message_id = $2`,
	countFailure: `
insert into {{inbox_failures}} as f (consumer, message_id, failures)
values ($1, $2, 1)
on conflict (consumer, message_id) do update
set failures = f.failures + 1,
	starts = case when $3 then max(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then max(f.alone - 1, 0) else f.alone end,
	changed_at = ` + sqliteNow + `
returning failures, errors, ` + sqliteNow,

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

func (s *sqliteStore) reopen(ctx context.Context, tx *sql.Tx, id messageID) (bool, error) {
	n, err := affected(tx.ExecContext(ctx, s.text.reopen, id.consumer, id.message))
	if err != nil && sqlerr.Retryable(err) {
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return n == 1, err
}
