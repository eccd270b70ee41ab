-- name: claim
-- By the primary key (consumer, message_id).
--
-- The insert waits for a transaction that holds the same id and has not ended. If that
-- commits, no row is inserted; if it rolls back, the id is ours. The wait has its own
-- lock_timeout, which is set before there is a row to insert (a case evaluates its
-- condition first) and restored for the handler. The setting oncemill.inbox identifies the
-- transaction for the seal. All of this takes one round trip. Subqueries would be easier
-- to read and cost 50 us more to plan.
--
-- A transaction whose client has fallen silent keeps the id, and the handler's locks, for
-- no longer than a handler and a COMMIT may take, unless the session sets its own timeout:
-- the connection may be dead without the server noticing.
insert into {{inbox}} (consumer, message_id, fingerprint)
select $1, $2, $4::bytea
where case
	when set_config('oncemill.lock_timeout', coalesce(nullif(current_setting('oncemill.lock_timeout', true), ''), current_setting('lock_timeout')), true) is not null
		and case current_setting('idle_in_transaction_session_timeout')
			when '0' then set_config('idle_in_transaction_session_timeout', $5, true) is not null
			else true
		end
	then set_config('lock_timeout', $3, true) is not null
end
on conflict (consumer, message_id) do nothing
returning
	set_config('lock_timeout', current_setting('oncemill.lock_timeout'), true),
	set_config('oncemill.inbox', 'open ' || txid_current(), true)

-- name: claim_group
-- By the primary key (consumer, message_id).
--
-- Like claim, for an array of ids in sorted order, so that two groups with common ids wait
-- for each other and do not deadlock. The lock_timeout stays in effect for the handlers of
-- the group. The sub-select is evaluated once, before there is a row to insert.
insert into {{inbox}} (consumer, message_id, fingerprint)
select $1, ids.id, nullif(ids.fingerprint, '')::bytea
from unnest($2::text[], $4::text[]) as ids (id, fingerprint)
where (select set_config('lock_timeout', $3, true)) is not null
	and (select case current_setting('idle_in_transaction_session_timeout')
		when '0' then set_config('idle_in_transaction_session_timeout', $5, true) is not null
		else true
	end)
on conflict (consumer, message_id) do nothing
returning message_id, set_config('oncemill.inbox', 'open ' || txid_current(), true)

-- name: limit_lock_wait
-- Reads no table. The claim, which follows in the transaction, restores the lock_timeout.
select
	set_config('oncemill.lock_timeout', current_setting('lock_timeout'), true),
	set_config('lock_timeout', $1, true),
	case current_setting('idle_in_transaction_session_timeout')
		when '0' then set_config('idle_in_transaction_session_timeout', $2, true)
	end

-- name: seal
-- Reads no table. Without parameters, so that every driver needs one round trip for it. If
-- the handler has ended the transaction, a new one does not have the setting.
select set_config('oncemill.inbox', 'sealed ' || txid_current(), true)
where current_setting('oncemill.inbox', true) = 'open ' || txid_current()

-- name: same_fingerprint
-- By primary key. The row is committed, and its fingerprint never changes.
select coalesce(fingerprint = $3, true)
from {{inbox}}
where consumer = $1
	and message_id = $2

-- name: reopen
-- By primary key. Two replays of a dead letter lock its row: one deletes it, the other
-- finds none.
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead

-- name: mark_dead
-- By primary key; the row was written by this transaction.
update {{inbox}}
set dead = true
where consumer = $1
	and message_id = $2

-- name: ping
-- Reads no table. A live connection answers, even if its transaction is aborted.
select 1

-- name: now
-- Reads no table.
select (extract(epoch from clock_timestamp()) * 1000000)::bigint
