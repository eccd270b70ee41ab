-- name: due_keys
-- index: idempotency_forget, from its oldest end. Takes no lock; delete_due checks the
-- condition again.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select octet_length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else octet_length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	(extract(epoch from i.lease_until - clock_timestamp()) * 1000000)::bigint, (extract(epoch from i.expires_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.forget_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from i.created_at) * 1000000)::bigint, coalesce((extract(epoch from i.completed_at) * 1000000)::bigint, 0), i.fingerprint
from {{idempotency}} as i
where i.forget_at <= statement_timestamp()
	and (i.state <> 1 or i.lease_until <= statement_timestamp())
order by i.forget_at
limit $1

-- name: due_key
-- Served by the primary key. Takes no lock. Whether a record may be purged within $2
-- microseconds.
select forget_at <= clock_timestamp() + $2::bigint * interval '1 microsecond' and (state <> 1 or lease_until <= clock_timestamp() + $2::bigint * interval '1 microsecond')
from {{idempotency}}
where key_hash = $1

-- name: delete_due
-- Served by the primary keys. A row is deleted as it was archived: a key that was claimed
-- or taken over meanwhile has another owner, whose token is unique. Locked rows are left
-- for later.
with dead as (
	select key_hash
	from {{idempotency}}
	where key_hash = any ($1::bytea[])
		and owner = any ($2::bytea[])
		and forget_at <= statement_timestamp()
		and (state <> 1 or lease_until <= statement_timestamp())
	for update skip locked
), bodies as (
	delete from {{idempotency_body}}
	where key_hash = any (array(select key_hash from dead))
)
delete from {{idempotency}}
where key_hash = any (array(select key_hash from dead))
