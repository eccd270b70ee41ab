package idempotency

var postgresQueries = queries{
	claim: postgresClaim, claimGroup: postgresClaimGroup, outstanding: postgresOutstanding,
	find: postgresFind, takeOver: postgresTakeOver, extend: postgresExtend, release: postgresRelease,
	complete: postgresComplete, completeTx: postgresFinish, completeGroup: postgresFinishGroup, open: postgresBegin,
	purge: postgresPurge, strip: postgresStrip,
}

// The statements that each request needs are functions; see the migration.
const (
	postgresRecord = `
select
	caller, fingerprint, state, owner, fence, endpoint, status, response,
	location, resource_id, correlation_id, trace_id, lease_left, expires_in, created_at, completed_at
from `
	postgresClaim      = postgresRecord + `{{idempotency_claim}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) where alive`
	postgresClaimGroup = `
select
	place, (record).caller, (record).fingerprint, (record).state, (record).owner, (record).fence, (record).endpoint, (record).status, (record).response,
	(record).location, (record).resource_id, (record).correlation_id, (record).trace_id, (record).lease_left, (record).expires_in, (record).created_at, (record).completed_at
from {{idempotency_claim_group}}($1, $2, $3, $4, $5, $6, $7, $8, $9)`
	postgresFind     = postgresRecord + `{{idempotency_find}}($1) where alive`
	postgresTakeOver = postgresRecord + `{{idempotency_take_over}}($1, $2, $3, $4, $5, $6, $7) where alive`
	postgresComplete = `select {{idempotency_complete}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`
	postgresBegin    = `select {{idempotency_begin}}($1, $2)`
	postgresFinish   = `select {{idempotency_finish}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`

	postgresFinishGroup = `select {{idempotency_finish_group}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`
)

// Served by idempotency_outstanding.
const postgresOutstanding = `
select count(*)
from (
	select from {{idempotency}}
	where caller = $1::bytea
		and completed_at is null
		and lease_until > statement_timestamp()
	limit $2::integer
) as outstanding`

// Served by the primary key. In this and the following statements, owner and fence make
// the update a compare-and-set.
const postgresExtend = `
update {{idempotency}}
set lease_until = statement_timestamp() + $4::bigint * interval '1 microsecond'
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1`

const postgresRelease = `
delete from {{idempotency}}
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1`

// Served by idempotency_forget. Concurrent purges take different rows.
const postgresPurge = `
with dead as (
	select key_hash from {{idempotency}}
	where forget_at <= clock_timestamp()
		and (state <> 1 or lease_until <= clock_timestamp())
	order by forget_at
	limit $1
	for update skip locked
), bodies as (
	delete from {{idempotency_body}}
	where key_hash in (select key_hash from dead)
)
delete from {{idempotency}}
where key_hash in (select key_hash from dead)`

// Served by idempotency_expire.
const postgresStrip = `
with old as (
	select key_hash from {{idempotency}}
	where response is not null
		and forget_at > expires_at
		and expires_at <= clock_timestamp()
	order by expires_at
	limit $1
	for update skip locked
)
update {{idempotency}}
set state = 4,
	response = null
where key_hash in (select key_hash from old)
	and state in (2, 3)`
