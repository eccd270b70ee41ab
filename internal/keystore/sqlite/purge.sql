-- name: purgeable
-- index: idempotency_forget. Takes no lock; purge checks the condition again.
select key_hash
from {{idempotency}}
where forget_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and (state <> 1 or lease_until <= cast(unixepoch('subsec') * 1000000 as integer))
order by forget_at
limit $1

-- name: expired
-- index: idempotency_expire. Takes no lock; expire checks the condition again.
select key_hash
from {{idempotency}}
where response is not null
	and forget_at > expires_at
	and expires_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and state in (2, 3)
order by expires_at
limit $1

-- name: expire
-- Served by the primary key. The condition is checked again, since the key may have been
-- claimed anew after it was listed.
update {{idempotency}}
set state = 4,
	response = null
where key_hash = $1
	and response is not null
	and forget_at > expires_at
	and expires_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and state in (2, 3)
