package idempotency

var postgresQueries = queries{
	claim: postgresClaim, forget: postgresForget, outstanding: postgresOutstanding,
	find: postgresFind, takeOver: postgresTakeOver, extend: postgresExtend, release: postgresRelease,
	complete: postgresComplete, completeTx: postgresCompleteTx, completeTxLarge: postgresCompleteTxLarge, open: postgresOpen, isOpen: postgresIsOpen,
	purge: postgresPurge, strip: postgresStrip,
}

// Times are set by statement_timestamp, so that two that are meant to be equal are.
//
// Served by the primary key.
//
// The primary key decides between claims made at once: the second one waits for
// this short statement and then finds the row. A claim that need not survive a
// crash of the server does not wait for the disk: the commit of the effects, which
// comes later in the log, takes it along, and without effects it is not missed.
const postgresClaim = `
insert into {{idempotency}} (
	key_hash, caller, fingerprint, state, owner, fence, endpoint,
	lease_until, expires_at, forget_at, correlation_id, trace_id
)
values (
	$1, $2, $3, 1, $4, 1, $5,
	statement_timestamp() + $6::bigint * interval '1 microsecond',
	statement_timestamp() + $7::bigint * interval '1 microsecond',
	statement_timestamp() + $7::bigint * interval '1 microsecond',
	nullif($8::text, ''), nullif($9::text, '')
)
on conflict (key_hash) do nothing
returning
	(extract(epoch from created_at) * 1000000)::bigint
	+ case when $10::text <> '' and set_config('synchronous_commit', $10::text, true) is null then 1 else 0 end`

// Served by the primary key. It repeats the conditions, so that a row that
// somebody has claimed anew meanwhile stays.
const postgresForget = `
with gone as (
	delete from {{idempotency}}
	where key_hash = $1
		and forget_at <= clock_timestamp()
		and (state <> 1 or lease_until <= clock_timestamp())
	returning key_hash, large
)
delete from {{idempotency_body}}
where key_hash in (select key_hash from gone where large)`

// Served by idempotency_outstanding.
const postgresOutstanding = `
select count(*)
from (select from {{idempotency}} where caller = $1::bytea and state = 1 limit $2::integer) as outstanding`

// Served by the primary keys. A plain read, which waits for nobody.
const postgresFind = `
select
	caller, fingerprint, state, owner, fence, endpoint, coalesce(status, 0),
	case when large then (select b.response from {{idempotency_body}} as b where b.key_hash = i.key_hash) else response end,
	coalesce(location, ''), coalesce(resource_id, ''), coalesce(correlation_id, ''), coalesce(trace_id, ''),
	(extract(epoch from lease_until - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from expires_at - clock_timestamp()) * 1000000)::bigint,
	(extract(epoch from created_at) * 1000000)::bigint,
	coalesce((extract(epoch from completed_at) * 1000000)::bigint, 0)
from {{idempotency}} as i
where key_hash = $1
	and (forget_at > clock_timestamp() or state = 1 and lease_until > clock_timestamp())`

// Served by the primary key. Of those who try at once one gets the row lock and
// the others nothing; a row that its owner is just completing is locked too and
// left to him.
const postgresTakeOver = `
update {{idempotency}}
set owner = $4::bytea,
	fence = fence + 1,
	lease_until = statement_timestamp() + $5::bigint * interval '1 microsecond',
	expires_at = statement_timestamp() + $6::bigint * interval '1 microsecond',
	forget_at = statement_timestamp() + $6::bigint * interval '1 microsecond'
where key_hash = (
	select key_hash from {{idempotency}}
	where key_hash = $1
		and owner = $2
		and fence = $3
		and state = 1
		and lease_until <= clock_timestamp()
	for update skip locked
)
returning
	fence,
	(extract(epoch from created_at) * 1000000)::bigint
	+ case when $7::text <> '' and set_config('synchronous_commit', $7::text, true) is null then 1 else 0 end`

// Served by the primary key. Owner and fence are the compare of the
// compare-and-set in this and the following statements.
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

// Served by the primary keys. A body that somebody left behind is replaced.
const postgresCompletion = `
update {{idempotency}}
set state = $4::smallint,
	status = nullif($5::integer, 0),
	response = case when $7::boolean then null else $6::bytea end,
	large = $7::boolean,
	location = nullif($8::text, ''),
	resource_id = nullif($9::text, ''),
	completed_at = clock_timestamp(),
	expires_at = statement_timestamp() + $10::bigint * interval '1 microsecond',
	forget_at = statement_timestamp() + $11::bigint * interval '1 microsecond'
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1`

const postgresBody = `
insert into {{idempotency_body}} (key_hash, response)
select key_hash, $6::bytea from done where $7::boolean
on conflict (key_hash) do update set response = excluded.response`

const postgresComplete = `
with done as (` + postgresCompletion + ` returning key_hash),
body as (` + postgresBody + `)
select from done`

// Served by the primary keys, and the row of the seal by its place. Under READ
// COMMITTED a claim that another has taken over is not touched; under the higher
// levels that raises 40001. Where the handler has ended the transaction, a new one
// does not have the setting, and nothing is touched either.
const postgresCompleteTx = `
with done as (` + postgresCompletion + `
	and current_setting('oncemill.idempotency', true) = 'open ' || txid_current()
returning key_hash),
swept as (delete from {{idempotency_open}} where ctid = $12::tid)
select set_config('oncemill.idempotency', 'sealed ' || txid_current(), true)
from done`

// The same with a large response.
const postgresCompleteTxLarge = `
with done as (` + postgresCompletion + `
	and current_setting('oncemill.idempotency', true) = 'open ' || txid_current()
returning key_hash),
body as (` + postgresBody + `),
swept as (delete from {{idempotency_open}} where ctid = $12::tid)
select set_config('oncemill.idempotency', 'sealed ' || txid_current(), true)
from done`

// Whether the transaction is the one that was opened.
const postgresIsOpen = `
select coalesce(current_setting('oncemill.idempotency', true) = 'open ' || txid_current(), false)`

// The row makes the deferred trigger look at the end of the transaction; see the
// migration. The settings end with the transaction: the first lets the server end
// one whose process stands still, so that whoever takes over is not kept waiting
// by its locks.
const postgresOpen = `
insert into {{idempotency_open}} (opened)
values (
	set_config('idle_in_transaction_session_timeout', $1, true) is not null
	and set_config('oncemill.idempotency', 'open ' || txid_current(), true) is not null
)
returning ctid::text, current_setting('transaction_isolation')`

// Served by idempotency_forget. Several purges at once take different rows.
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
