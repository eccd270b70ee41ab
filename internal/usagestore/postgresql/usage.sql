-- name: add
-- Served by the primary key. One row, in a transaction of its own: it waits for the same
-- short statement of other processes, and for nothing else. It does not wait for the disk.
-- After a clock that was set back a little, the window that has begun goes on; one that
-- begins later than the next window was counted by a wrong clock, and is forgotten.
with settings as materialized (
	select set_config('synchronous_commit', 'off', true) as s,
		(extract(epoch from statement_timestamp()) * 1000000)::bigint as now
)
insert into {{idempotency_usage}} as u (caller, span, ends_at, keys, bytes)
select $1::bytea, $2::bigint, (now / $2::bigint + 1) * $2::bigint, greatest($3::bigint, 0), greatest($4::bigint, 0)
from settings
on conflict (caller, span) do update
set keys = greatest(case when u.ends_at between excluded.ends_at and excluded.ends_at + u.span then u.keys else 0 end + $3::bigint, 0),
	bytes = greatest(case when u.ends_at between excluded.ends_at and excluded.ends_at + u.span then u.bytes else 0 end + $4::bigint, 0),
	ends_at = case when u.ends_at between excluded.ends_at and excluded.ends_at + u.span then u.ends_at else excluded.ends_at end
returning u.keys, u.bytes, u.ends_at - (extract(epoch from statement_timestamp()) * 1000000)::bigint

-- name: purge
-- index: idempotency_usage_ends, from its oldest end, and the primary key. Rows that others
-- have locked are counted again, and left.
delete from {{idempotency_usage}}
where ctid = any (array(
	select ctid
	from {{idempotency_usage}}
	where ends_at < (extract(epoch from statement_timestamp()) * 1000000)::bigint
	order by ends_at
	limit $1
	for update skip locked
))

-- name: erase
-- Served by the primary key: a few rows.
delete from {{idempotency_usage}}
where caller = $1
