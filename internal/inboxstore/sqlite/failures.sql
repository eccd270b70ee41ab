-- name: record_start
-- By the primary keys. There is one writer.
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select 1 from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = cast(unixepoch('subsec') * 1000000 as integer)
returning starts > 1, max(again_at - cast(unixepoch('subsec') * 1000000 as integer), 0)

-- name: charge
-- By primary key. There is one writer.
update {{inbox_failures}}
set alone = alone + 1
where consumer = $1
	and message_id = $2
returning alone

-- name: discharge
-- By primary key. There is one writer.
update {{inbox_failures}}
set alone = alone - 1
where consumer = $1
	and message_id = $2
	and alone > 0

-- name: record_end
-- By primary key. There is one writer.
update {{inbox_failures}}
set starts = max(starts - 1, 0),
	alone = case when $3 then max(alone - 1, 0) else alone end,
	changed_at = cast(unixepoch('subsec') * 1000000 as integer)
where consumer = $1
	and message_id = $2

-- name: count_failure
-- By primary key. There is one writer.
insert into {{inbox_failures}} as f (consumer, message_id, failures, unavailable, key, seq)
values ($1, $2, $5, $6, $7, $8)
on conflict (consumer, message_id) do update
set failures = f.failures + excluded.failures,
	unavailable = f.unavailable + excluded.unavailable,
	key = excluded.key,
	seq = excluded.seq,
	starts = case when $3 then max(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then max(f.alone - 1, 0) else f.alone end,
	changed_at = cast(unixepoch('subsec') * 1000000 as integer)
returning failures, unavailable, errors, cast(unixepoch('subsec') * 1000000 as integer)

-- name: keep_errors
-- By primary key; the row was written by this transaction.
update {{inbox_failures}}
set errors = $3,
	again_at = cast(unixepoch('subsec') * 1000000 as integer) + $4
where consumer = $1
	and message_id = $2

-- name: failed_deliveries
-- By primary key.
select failures, unavailable
from {{inbox_failures}}
where consumer = $1
	and message_id = $2

-- name: delete_failures
-- By primary key. There is one writer.
delete from {{inbox_failures}}
where consumer = $1
	and message_id = $2
