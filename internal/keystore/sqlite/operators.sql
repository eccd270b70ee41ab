-- What operators see and do. The numbers of states, as bits: running 1, interrupted 2,
-- completed 4, not replayable 8, expired 16.

-- name: keys_end
-- Served by the primary key: the last key of a slice of $2 keys after $1. Takes no lock.
select key_hash
from {{idempotency}}
where key_hash > $1
order by key_hash
limit 1 offset $2

-- name: keys_between
-- Served by the primary key, in a slice that keys_end has bounded. Takes no lock and waits
-- for no writer.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	i.lease_until - cast(unixepoch('subsec') * 1000000 as integer), i.expires_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.forget_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.created_at, coalesce(i.completed_at, 0), i.fingerprint
from {{idempotency}} as i
where i.key_hash > $6
	and i.key_hash <= $7
	and ($8 is null or i.caller = $8)
	and ($1 = '' or i.endpoint = $1)
	and i.created_at >= $2
	and i.created_at < $3
	and (case
		when i.state = 1 and i.lease_until > cast(unixepoch('subsec') * 1000000 as integer) then 1
		when i.state = 1 then 2
		when i.expires_at <= cast(unixepoch('subsec') * 1000000 as integer) then 16
		when i.state = 2 then 4
		when i.state = 3 then 8
		else 16
	end) & $4 <> 0
order by i.key_hash
limit $5

-- name: open_keys
-- index: idempotency_outstanding, at most $6 of its entries. Takes no lock.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	i.lease_until - cast(unixepoch('subsec') * 1000000 as integer), i.expires_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.forget_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.created_at, coalesce(i.completed_at, 0), i.fingerprint
from (
	select *
	from {{idempotency}}
	where completed_at is null
	order by caller
	limit $6
) as i
where ($1 = '' or i.endpoint = $1)
	and i.created_at >= $2
	and i.created_at < $3
	and (case
		when i.state = 1 and i.lease_until > cast(unixepoch('subsec') * 1000000 as integer) then 1
		when i.state = 1 then 2
		when i.expires_at <= cast(unixepoch('subsec') * 1000000 as integer) then 16
		when i.state = 2 then 4
		when i.state = 3 then 8
		else 16
	end) & $4 <> 0
order by i.created_at, i.key_hash
limit $5

-- name: open_keys_of
-- index: idempotency_outstanding, at most $6 of the entries of a caller. Takes no lock.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	i.lease_until - cast(unixepoch('subsec') * 1000000 as integer), i.expires_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.forget_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.created_at, coalesce(i.completed_at, 0), i.fingerprint
from (
	select *
	from {{idempotency}}
	where completed_at is null
		and caller = $7
	limit $6
) as i
where ($1 = '' or i.endpoint = $1)
	and i.created_at >= $2
	and i.created_at < $3
	and (case
		when i.state = 1 and i.lease_until > cast(unixepoch('subsec') * 1000000 as integer) then 1
		when i.state = 1 then 2
		when i.expires_at <= cast(unixepoch('subsec') * 1000000 as integer) then 16
		when i.state = 2 then 4
		when i.state = 3 then 8
		else 16
	end) & $4 <> 0
order by i.created_at, i.key_hash
limit $5

-- name: more_open
-- index: idempotency_outstanding, at most $1 of its entries and one. Takes no lock.
select count(*) > $1
from (
	select 1
	from {{idempotency}}
	where completed_at is null
	limit $1 + 1
) as started

-- name: more_open_of
-- As more_open, of a caller.
select count(*) > $1
from (
	select 1
	from {{idempotency}}
	where completed_at is null
		and caller = $2
	limit $1 + 1
) as started

-- name: settle
-- Served by the primary key. State, owner, fence and lease make the update a
-- compare-and-set. There is one writer. The new owner makes a late completion of the
-- former one fail.
update {{idempotency}}
set state = $5,
	owner = $4,
	fence = fence + 1,
	status = nullif($6, 0),
	response = case when $8 then null else $7 end,
	large = $8,
	location = nullif($9, ''),
	completed_at = cast(unixepoch('subsec') * 1000000 as integer),
	expires_at = cast(unixepoch('subsec') * 1000000 as integer) + $10,
	forget_at = cast(unixepoch('subsec') * 1000000 as integer) + $11
where key_hash = (
	select key_hash
	from {{idempotency}}
	where key_hash = $1
		and owner = $2
		and fence = $3
		and state = 1
		and lease_until <= cast(unixepoch('subsec') * 1000000 as integer)
)

-- name: forget_key
-- Served by the primary key. State, owner, fence and lease make the delete a
-- compare-and-set. A trigger also deletes the row of a large response.
delete from {{idempotency}}
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = $4
	and (state <> 1 or lease_until <= cast(unixepoch('subsec') * 1000000 as integer))

-- name: erase_between
-- Served by the primary key, in a slice that keys_end has bounded. A trigger also deletes
-- the rows of large responses.
delete from {{idempotency}}
where key_hash > $1
	and key_hash <= $2
	and caller = $3
	and (state <> 1 or lease_until <= cast(unixepoch('subsec') * 1000000 as integer))
returning key_hash

-- name: erase_bodies
-- Served by the primary keys, in a slice that keys_end has bounded. The trigger has left
-- nothing to do.
delete from {{idempotency_body}}
where key_hash > $1
	and key_hash <= $2
	and (select i.key_hash from {{idempotency}} as i where i.key_hash = {{idempotency_body}}.key_hash) is null

-- name: keys_of
-- Served by the primary key, in a slice that keys_end has bounded. Takes no lock.
select count(*)
from {{idempotency}}
where key_hash > $1
	and key_hash <= $2
	and caller = $3
