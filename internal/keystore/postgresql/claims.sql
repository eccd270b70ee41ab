-- The statements that every request needs call functions of the migration: a session
-- plans the statements inside a function once, also behind a pooler, with sequential
-- scans off. The comments here describe those inner statements.

-- name: claim
-- Served by the primary key. Inserts with "on conflict do nothing": of concurrent
-- claims one inserts, and the others wait for its short transaction and find no row.
-- An existing record is only read, which waits for nobody.
select
	caller, fingerprint, state, owner, fence, endpoint, status, response,
	location, resource_id, correlation_id, trace_id, lease_left, expires_in, created_at, completed_at
from {{idempotency_claim}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
where alive

-- name: claim_group
-- Served by the primary key, once for each key. The keys are sorted, so that
-- concurrent groups lock in the same order and do not deadlock.
select
	place, (record).caller, (record).fingerprint, (record).state, (record).owner, (record).fence,
	(record).endpoint, (record).status, (record).response, (record).location, (record).resource_id,
	(record).correlation_id, (record).trace_id, (record).lease_left, (record).expires_in,
	(record).created_at, (record).completed_at
from {{idempotency_claim_group}}($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- name: find
-- Served by the primary key. Takes no lock and waits for no writer.
select
	caller, fingerprint, state, owner, fence, endpoint, status, response,
	location, resource_id, correlation_id, trace_id, lease_left, expires_in, created_at, completed_at
from {{idempotency_find}}($1)
where alive

-- name: take_over
-- Served by the primary key. The row is locked with "for update skip locked" after
-- owner, fence and lease have been checked: one of several successors gets it, and a row
-- that its owner is completing is left to the owner.
select
	caller, fingerprint, state, owner, fence, endpoint, status, response,
	location, resource_id, correlation_id, trace_id, lease_left, expires_in, created_at, completed_at
from {{idempotency_take_over}}($1, $2, $3, $4, $5, $6, $7)
where alive

-- name: outstanding
-- index: idempotency_outstanding, up to the limit. Takes no lock.
select count(*)
from (
	select
	from {{idempotency}}
	where caller = $1::bytea
		and completed_at is null
		and lease_until > statement_timestamp()
	limit $2::integer
) as outstanding

-- name: extend
-- Served by the primary key. The row is locked with "for update skip locked" after owner
-- and fence have been checked, which makes the update a compare-and-set, and it waits for
-- nobody: a process that froze before its COMMIT may have the row locked for long. It does
-- not wait for the disk either, which may take longer than the lease: lost in a crash of
-- the server, it is a renewal that failed.
with settings as materialized (
	select set_config('synchronous_commit', 'off', true)
)
update {{idempotency}}
set lease_until = statement_timestamp() + $4::bigint * interval '1 microsecond'
where key_hash = (
	select key_hash
	from {{idempotency}}
	where key_hash = $1
		and owner = $2
		and fence = $3
		and state = 1
	for update skip locked
)
	and exists (select from settings)

-- name: release
-- Served by the primary key. Owner and fence make the delete a compare-and-set.
delete from {{idempotency}}
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1

-- name: complete
-- Served by the primary key. Owner and fence make the update a compare-and-set. It
-- returns false for a claim of another owner.
select {{idempotency_complete}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
