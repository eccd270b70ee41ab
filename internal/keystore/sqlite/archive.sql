-- name: due_keys
-- index: idempotency_forget, from its oldest end. Takes no lock; delete_due checks the
-- condition again.
select
	i.key_hash, i.caller, i.state, i.owner, i.fence, i.endpoint, coalesce(i.status, 0),
	coalesce(case when i.large then (select length(b.response) from {{idempotency_body}} as b where b.key_hash = i.key_hash) else length(i.response) end, 0),
	coalesce(i.location, ''), coalesce(i.resource_id, ''), coalesce(i.correlation_id, ''), coalesce(i.trace_id, ''),
	i.lease_until - cast(unixepoch('subsec') * 1000000 as integer), i.expires_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.forget_at - cast(unixepoch('subsec') * 1000000 as integer),
	i.created_at, coalesce(i.completed_at, 0), i.fingerprint
from {{idempotency}} as i
where i.forget_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and (i.state <> 1 or i.lease_until <= cast(unixepoch('subsec') * 1000000 as integer))
order by i.forget_at
limit $1

-- name: due_key
-- Served by the primary key. Takes no lock. Whether a record may be purged within $2
-- microseconds.
select forget_at <= cast(unixepoch('subsec') * 1000000 as integer) + $2 and (state <> 1 or lease_until <= cast(unixepoch('subsec') * 1000000 as integer) + $2)
from {{idempotency}}
where key_hash = $1

-- name: delete_due
-- Served by the primary key. A row is deleted as it was archived: a key that was claimed
-- or taken over meanwhile has another owner, whose token is unique.
delete from {{idempotency}}
where key_hash = $1
	and owner = $2
	and forget_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and (state <> 1 or lease_until <= cast(unixepoch('subsec') * 1000000 as integer))
