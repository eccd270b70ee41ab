-- name: record_start
-- By the primary keys. It locks its row, so concurrent calls count one after the other.
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3::boolean))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = clock_timestamp()
returning starts > 1, greatest((extract(epoch from f.again_at - clock_timestamp()) * 1000000)::bigint, 0)

-- name: charge
-- By primary key. It locks its row, so concurrent calls count one after the other.
update {{inbox_failures}}
set alone = alone + 1
where consumer = $1
	and message_id = $2
returning alone

-- name: discharge
-- By primary key. It locks its row, so concurrent calls count one after the other.
update {{inbox_failures}}
set alone = alone - 1
where consumer = $1
	and message_id = $2
	and alone > 0

-- name: record_end
-- By primary key. It locks its row, so concurrent calls count one after the other.
update {{inbox_failures}}
set starts = greatest(starts - 1, 0),
	alone = case when $3 then greatest(alone - 1, 0) else alone end,
	changed_at = clock_timestamp()
where consumer = $1
	and message_id = $2

-- name: count_failure
-- By primary key. It locks the row for keep_errors.
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
returning failures, unavailable, errors, (extract(epoch from clock_timestamp()) * 1000000)::bigint

-- name: keep_errors
-- By primary key; the row was written by this transaction.
update {{inbox_failures}}
set errors = $3,
	again_at = clock_timestamp() + $4::bigint * interval '1 microsecond'
where consumer = $1
	and message_id = $2

-- name: failed_deliveries
-- By primary key.
select failures, unavailable
from {{inbox_failures}}
where consumer = $1
	and message_id = $2

-- name: delete_failures
-- By primary key. It locks its row, so concurrent calls count one after the other.
delete from {{inbox_failures}}
where consumer = $1
	and message_id = $2
