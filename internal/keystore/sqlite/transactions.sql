-- name: seal
-- Served by the primary key. The seal violates a deferred foreign key, so the database
-- refuses a commit until finish removes it. Returns no row for a claim of another owner,
-- and otherwise whether foreign keys are on.
update {{idempotency}}
set seal = 1
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1
returning (select foreign_keys from pragma_foreign_keys)

-- name: finish
-- Served by the primary key. As complete, but only in the transaction that has set the
-- seal, since an unsealed row is never committed. No row means that the handler has ended
-- the transaction, or that another owner has the claim.
update {{idempotency}}
set state = $4,
	status = nullif($5, 0),
	response = case when $7 then null else $6 end,
	large = $7,
	location = nullif($8, ''),
	resource_id = nullif($9, ''),
	completed_at = cast(unixepoch('subsec') * 1000000 as integer),
	expires_at = cast(unixepoch('subsec') * 1000000 as integer) + $10,
	forget_at = cast(unixepoch('subsec') * 1000000 as integer) + $11,
	seal = null
where key_hash = $1
	and owner = $2
	and fence = $3
	and state = 1
	and seal = 1

-- name: sealed
-- Served by the primary key. A row with a seal is never committed, so one that is
-- visible belongs to the transaction that asks, which is therefore still open.
select count(*)
from {{idempotency}}
where key_hash = $1
	and seal = 1
