-- name: add
-- Served by the primary key. There is one writer. After a clock that was set back a little,
-- the window that has begun goes on; one that begins later than the next window was counted
-- by a wrong clock, and is forgotten.
insert into {{idempotency_usage}} as u (caller, span, ends_at, keys, bytes)
values ($1, $2, (cast(unixepoch('subsec') * 1000000 as integer) / $2 + 1) * $2, max($3, 0), max($4, 0))
on conflict (caller, span) do update
set keys = max(case when u.ends_at between excluded.ends_at and excluded.ends_at + u.span then u.keys else 0 end + $3, 0),
	bytes = max(case when u.ends_at between excluded.ends_at and excluded.ends_at + u.span then u.bytes else 0 end + $4, 0),
	ends_at = case when u.ends_at between excluded.ends_at and excluded.ends_at + u.span then u.ends_at else excluded.ends_at end
returning keys, bytes, ends_at - cast(unixepoch('subsec') * 1000000 as integer)

-- name: purge
-- index: idempotency_usage_ends, from its oldest end, and the primary key.
delete from {{idempotency_usage}}
where (caller, span) in (
	select caller, span
	from {{idempotency_usage}}
	where ends_at < cast(unixepoch('subsec') * 1000000 as integer)
	order by ends_at
	limit $1
)

-- name: erase
-- Served by the primary key: a few rows.
delete from {{idempotency_usage}}
where caller = $1
