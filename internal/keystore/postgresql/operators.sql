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
	coalesce(case when i.large then (select octet_length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else octet_length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	(extract(epoch from i.lease_until - clock_timestamp()) * 1000000)::bigint, (extract(epoch from i.expires_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.forget_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.created_at) * 1000000)::bigint, coalesce((extract(epoch from i.completed_at) * 1000000)::bigint, 0), i.fingerprint
from {{idempotency}} as i
where i.key_hash > $6
	and i.key_hash <= $7
	and ($8::bytea is null or i.caller = $8::bytea)
	and ($1::text = '' or i.endpoint = $1::text)
	and i.created_at >= timestamptz 'epoch' + $2::bigint * interval '1 microsecond'
	and i.created_at < timestamptz 'epoch' + $3::bigint * interval '1 microsecond'
	and (case
		when i.state = 1 and i.lease_until > statement_timestamp() then 1
		when i.state = 1 then 2
		when i.expires_at <= statement_timestamp() then 16
		when i.state = 2 then 4
		when i.state = 3 then 8
		else 16
	end) & $4::integer <> 0
order by i.key_hash
limit $5::integer

-- name: open_keys
-- index: idempotency_outstanding, at most $6 of its entries. Takes no lock.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select octet_length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else octet_length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	(extract(epoch from i.lease_until - clock_timestamp()) * 1000000)::bigint, (extract(epoch from i.expires_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.forget_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.created_at) * 1000000)::bigint, coalesce((extract(epoch from i.completed_at) * 1000000)::bigint, 0), i.fingerprint
from (
	select *
	from {{idempotency}}
	where completed_at is null
	order by caller
	limit $6
) as i
where ($1::text = '' or i.endpoint = $1::text)
	and i.created_at >= timestamptz 'epoch' + $2::bigint * interval '1 microsecond'
	and i.created_at < timestamptz 'epoch' + $3::bigint * interval '1 microsecond'
	and (case
		when i.state = 1 and i.lease_until > statement_timestamp() then 1
		when i.state = 1 then 2
		when i.expires_at <= statement_timestamp() then 16
		when i.state = 2 then 4
		when i.state = 3 then 8
		else 16
	end) & $4::integer <> 0
order by i.created_at, i.key_hash
limit $5::integer

-- name: open_keys_of
-- index: idempotency_outstanding, at most $6 of the entries of a caller. Takes no lock.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select octet_length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else octet_length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	(extract(epoch from i.lease_until - clock_timestamp()) * 1000000)::bigint, (extract(epoch from i.expires_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.forget_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.created_at) * 1000000)::bigint, coalesce((extract(epoch from i.completed_at) * 1000000)::bigint, 0), i.fingerprint
from (
	select *
	from {{idempotency}}
	where completed_at is null
		and caller = $7
	limit $6
) as i
where ($1::text = '' or i.endpoint = $1::text)
	and i.created_at >= timestamptz 'epoch' + $2::bigint * interval '1 microsecond'
	and i.created_at < timestamptz 'epoch' + $3::bigint * interval '1 microsecond'
	and (case
		when i.state = 1 and i.lease_until > statement_timestamp() then 1
		when i.state = 1 then 2
		when i.expires_at <= statement_timestamp() then 16
		when i.state = 2 then 4
		when i.state = 3 then 8
		else 16
	end) & $4::integer <> 0
order by i.created_at, i.key_hash
limit $5::integer

-- name: more_open
-- index: idempotency_outstanding, at most $1 of its entries and one. Takes no lock.
select count(*) > $1::bigint
from (
	select 1
	from {{idempotency}}
	where completed_at is null
	limit $1::bigint + 1
) as started

-- name: more_open_of
-- As more_open, of a caller.
select count(*) > $1::bigint
from (
	select 1
	from {{idempotency}}
	where completed_at is null
		and caller = $2
	limit $1::bigint + 1
) as started

-- name: settle
-- Served by the primary key. State, owner, fence and lease make the update a
-- compare-and-set. The row is locked with "for update skip locked" after they have been
-- checked: of operators, a successor and the owner, one gets it and nobody waits. The new
-- owner makes a late completion of the former one fail.
update {{idempotency}}
set state = $5,
	owner = $4,
	fence = fence + 1,
	status = nullif($6, 0),
	response = case when $8 then null else $7::bytea end,
	large = $8,
	location = nullif($9, ''),
	completed_at = clock_timestamp(),
	expires_at = statement_timestamp() + $10::bigint * interval '1 microsecond',
	forget_at = statement_timestamp() + $11::bigint * interval '1 microsecond'
where key_hash = (
	select key_hash
	from {{idempotency}}
	where key_hash = $1
		and owner = $2
		and fence = $3
		and state = 1
		and lease_until <= statement_timestamp()
	for update skip locked
)

-- name: store_body
-- Served by the primary key. Runs in the transaction that settles the claim.
insert into {{idempotency_body}} (key_hash, response)
values ($1, $2)
on conflict (key_hash) do update
set response = excluded.response

-- name: forget_key
-- Served by the primary keys. As settle, state, owner, fence and lease make the delete a
-- compare-and-set that waits for nobody.
with gone as (
	select key_hash
	from {{idempotency}}
	where key_hash = $1
		and owner = $2
		and fence = $3
		and state = $4
		and (state <> 1 or lease_until <= statement_timestamp())
	for update skip locked
), bodies as (
	delete from {{idempotency_body}}
	where key_hash = any (array(select key_hash from gone))
)
delete from {{idempotency}}
where key_hash = any (array(select key_hash from gone))

-- name: erase_between
-- Served by the primary key, in a slice that keys_end has bounded. Rows that others have
-- locked are left, and counted by keys_of. The keys are an array, as in purge.
delete from {{idempotency}}
where key_hash = any (array(
	select key_hash
	from {{idempotency}}
	where key_hash > $1
		and key_hash <= $2
		and caller = $3
		and (state <> 1 or lease_until <= statement_timestamp())
	for update skip locked
))
returning key_hash

-- name: erase_bodies
-- Served by the primary keys, in a slice that keys_end has bounded. It runs after
-- erase_between, in its transaction, and so sees large responses that had not committed when
-- that statement began, and whose keys it has deleted all the same.
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
