package idempotency

var sqliteQueries = queries{
	claim: sqliteClaim, forget: sqliteForget, outstanding: sqliteOutstanding,
	find: sqliteFind, takeOver: sqliteTakeOver, extend: sqliteExtend, release: sqliteRelease,
	complete: sqliteComplete, completeBody: sqliteBody, completeTx: sqliteCompleteTx, open: sqliteOpen, lost: sqliteLost,
	forgettable: sqliteForgettable, purge: sqliteForget, expired: sqliteExpired, strip: sqliteStrip,
}

const sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

// Served by the primary key. Every claim is durable.
const sqliteClaim = `
insert into {{idempotency}} (
	key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at,
	lease_until, expires_at, forget_at, correlation_id, trace_id
)
select
	$1, $2, $3, 1, $4, 1, $5, ` + sqliteNow + `,
	` + sqliteNow + ` + $6, ` + sqliteNow + ` + $7, ` + sqliteNow + ` + $7, nullif($8, ''), nullif($9, '')
where true
on conflict (key_hash) do nothing`

// Served by the primary key. A trigger also deletes the row of a large response.
const sqliteForget = `
delete from {{idempotency}}
where key_hash = $1
	and forget_at <= ` + sqliteNow + `
	and (state <> 1 or lease_until <= ` + sqliteNow + `)`

// Served by idempotency_outstanding.
const sqliteOutstanding = `
select count(*)
from (
	select 1 from {{idempotency}}
	where caller = $1
		and completed_at is null
		and lease_until > ` + sqliteNow + `
	limit $2
)`

// Served by the primary keys. A reader does not wait for the writer.
const sqliteFind = `
select
	caller, fingerprint, state, owner, fence, endpoint, coalesce(status, 0),
	case when large then (select b.response from {{idempotency_body}} as b where b.key_hash = i.key_hash) else response end,
	coalesce(location, ''), coalesce(resource_id, ''), coalesce(correlation_id, ''), coalesce(trace_id, ''),
	lease_until - ` + sqliteNow + `, expires_at - ` + sqliteNow + `, created_at, coalesce(completed_at, 0)
from {{idempotency}} as i
where key_hash = $1
	and (forget_at > ` + sqliteNow + ` or state = 1 and lease_until > ` + sqliteNow + `)`

// This and all that follow are served by the primary key. SQLite's single writer makes
// each a compare-and-set.
const sqliteTakeOver = `
update {{idempotency}}
set owner = $4,
	fence = fence + 1,
	lease_until = ` + sqliteNow + ` + $5,
	expires_at = ` + sqliteNow + ` + $6,
	forget_at = ` + sqliteNow + ` + $6
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1
	and lease_until <= ` + sqliteNow

const sqliteExtend = `
update {{idempotency}}
set lease_until = ` + sqliteNow + ` + $4
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1`

const sqliteRelease = `
delete from {{idempotency}}
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1`

const sqliteComplete = `
update {{idempotency}}
set state = $4,
	status = nullif($5, 0),
	response = case when $7 then null else $6 end,
	large = $7,
	location = nullif($8, ''),
	resource_id = nullif($9, ''),
	completed_at = ` + sqliteNow + `,
	expires_at = ` + sqliteNow + ` + $10,
	forget_at = ` + sqliteNow + ` + $11,
	seal = null
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1`

// An unsealed row is never committed. No row means that the handler has ended the
// transaction, or that another owner has the claim.
const sqliteCompleteTx = sqliteComplete + `
	and seal = 1`

const sqliteBody = `
insert into {{idempotency_body}} (key_hash, response)
values ($1, $2)
on conflict (key_hash) do update set response = excluded.response`

const sqliteOpen = `
update {{idempotency}}
set seal = 1
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1
returning (select foreign_keys from pragma_foreign_keys)`

const sqliteLost = `
select count(*)
from {{idempotency}}
where key_hash = $1
	and seal = 1`

// Served by idempotency_forget.
const sqliteForgettable = `
select key_hash
from {{idempotency}}
where forget_at <= ` + sqliteNow + `
	and (state <> 1 or lease_until <= ` + sqliteNow + `)
order by forget_at
limit $1`

// Served by idempotency_expire.
const sqliteExpired = `
select key_hash
from {{idempotency}}
where response is not null
	and forget_at > expires_at
	and expires_at <= ` + sqliteNow + `
	and state in (2, 3)
order by expires_at
limit $1`

const sqliteStrip = `
update {{idempotency}}
set state = 4,
	response = null
where key_hash = $1
	and response is not null
	and forget_at > expires_at
	and expires_at <= ` + sqliteNow + `
	and state in (2, 3)`
