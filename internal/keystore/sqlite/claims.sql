-- name: claim
-- Served by the primary key. Every claim is durable. SQLite has one writer, so nobody
-- inserts between the conflict check and the insert.
insert into {{idempotency}} (
	key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at,
	lease_until, expires_at, forget_at, correlation_id, trace_id
)
select
	$1, $2, $3, 1, $4, 1, $5, cast(unixepoch('subsec') * 1000000 as integer),
	cast(unixepoch('subsec') * 1000000 as integer) + $6, cast(unixepoch('subsec') * 1000000 as integer) + $7, cast(unixepoch('subsec') * 1000000 as integer) + $7, nullif($8, ''), nullif($9, '')
where true
on conflict (key_hash) do nothing

-- name: purge
-- Served by the primary key. A trigger also deletes the row of a large response. The
-- condition is checked again, since the key may have been claimed anew after it was
-- listed.
delete from {{idempotency}}
where key_hash = $1
	and forget_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and (state <> 1 or lease_until <= cast(unixepoch('subsec') * 1000000 as integer))

-- name: find
-- Served by the primary keys. A reader sees one snapshot and does not wait for the
-- writer.
select
	caller, fingerprint, state, owner, fence, endpoint, coalesce(status, 0),
	case when large then (select b.response from {{idempotency_body}} as b where b.key_hash = i.key_hash) else response end,
	coalesce(location, ''), coalesce(resource_id, ''), coalesce(correlation_id, ''), coalesce(trace_id, ''),
	lease_until - cast(unixepoch('subsec') * 1000000 as integer), expires_at - cast(unixepoch('subsec') * 1000000 as integer),
	created_at, coalesce(completed_at, 0)
from {{idempotency}} as i
where key_hash = $1
	and (forget_at > cast(unixepoch('subsec') * 1000000 as integer) or state = 1 and lease_until > cast(unixepoch('subsec') * 1000000 as integer))

-- name: take_over
-- Served by the primary key. Owner, fence and lease make the update a compare-and-set,
-- since there is one writer.
update {{idempotency}}
set owner = $4,
	fence = fence + 1,
	lease_until = cast(unixepoch('subsec') * 1000000 as integer) + $5,
	expires_at = cast(unixepoch('subsec') * 1000000 as integer) + $6,
	forget_at = cast(unixepoch('subsec') * 1000000 as integer) + $6
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1
	and lease_until <= cast(unixepoch('subsec') * 1000000 as integer)

-- name: outstanding
-- index: idempotency_outstanding, up to the limit.
select count(*)
from (
	select 1
	from {{idempotency}}
	where caller = $1
		and completed_at is null
		and lease_until > cast(unixepoch('subsec') * 1000000 as integer)
	limit $2
)

-- name: extend
-- Served by the primary key. Owner and fence make the update a compare-and-set, since
-- there is one writer.
update {{idempotency}}
set lease_until = cast(unixepoch('subsec') * 1000000 as integer) + $4
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1

-- name: release
-- Served by the primary key. Owner and fence make the delete a compare-and-set, since
-- there is one writer.
delete from {{idempotency}}
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1

-- name: complete
-- Served by the primary key. Owner and fence make the update a compare-and-set, since
-- there is one writer.
update {{idempotency}}
set state = $4,
	status = nullif($5, 0),
	response = case when $7 then null else $6 end,
	large = $7,
	location = nullif($8, ''),
	resource_id = nullif($9, ''),
	completed_at = cast(unixepoch('subsec') * 1000000 as integer),
	expires_at = cast(unixepoch('subsec') * 1000000 as integer) + $10,
	forget_at = cast(unixepoch('subsec') * 1000000 as integer) + $11,
	seal = null
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1

-- name: store_body
-- Served by the primary key. Runs in the transaction that completes the claim.
insert into {{idempotency_body}} (key_hash, response)
values ($1, $2)
on conflict (key_hash) do update
set response = excluded.response
