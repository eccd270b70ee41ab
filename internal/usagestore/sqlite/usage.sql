-- name: add
-- Served by the primary key. There is one writer. After a clock that was set back, the
-- window that has begun goes on.
insert into {{idempotency_usage}} as u (caller, span, ends_at, keys, bytes)
values ($1, $2, (cast(unixepoch('subsec') * 1000000 as integer) / $2 + 1) * $2, max($3, 0), max($4, 0))
on conflict (caller, span) do update
set keys = max(case when u.ends_at >= excluded.ends_at then u.keys else 0 end + $3, 0),
	bytes = max(case when u.ends_at >= excluded.ends_at then u.bytes else 0 end + $4, 0),
	ends_at = max(u.ends_at, excluded.ends_at)
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
