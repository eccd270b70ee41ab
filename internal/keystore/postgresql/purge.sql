-- name: purge
-- index: idempotency_forget, and the primary keys. statement_timestamp() can be used in an
-- index, clock_timestamp() cannot. Concurrent purges take different rows, and a locked row
-- is left for later. The deletes check nothing again, since the rows are locked. The keys
-- are an array, because a join with an unknown number of them is planned as a scan.
with dead as (
	select key_hash
	from {{idempotency}}
	where forget_at <= statement_timestamp()
		and (state <> 1 or lease_until <= statement_timestamp())
	order by forget_at
	limit $1
	for update skip locked
), bodies as (
	delete from {{idempotency_body}}
	where key_hash = any (array(select key_hash from dead))
)
delete from {{idempotency}}
where key_hash = any (array(select key_hash from dead))

-- name: expire
-- index: idempotency_expire, and the primary key. Concurrent purges take different
-- rows. A large response has a row of its own and is never refused after it expires, so
-- there is none to delete here.
with old as (
	select key_hash
	from {{idempotency}}
	where response is not null
		and forget_at > expires_at
		and expires_at <= statement_timestamp()
	order by expires_at
	limit $1
	for update skip locked
)
update {{idempotency}}
set state = 4,
	response = null
where key_hash = any (array(select key_hash from old))
	and state in (2, 3)
