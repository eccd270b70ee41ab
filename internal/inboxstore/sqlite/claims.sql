-- name: claim
-- By the primary key (consumer, message_id). It is the first statement of the transaction.
-- So a connection that did not begin as a writer becomes one here without having read, and
-- waits for its turn.
insert into {{inbox}} (consumer, message_id, seal, fingerprint)
values ($1, $2, 1, $3)
on conflict (consumer, message_id) do nothing
returning (select foreign_keys from pragma_foreign_keys)

-- name: seal
-- By primary key. An unsealed row is never committed, so a visible one was written by this
-- transaction; none means that the handler has ended it.
update {{inbox}}
set seal = null
where consumer = $1
	and message_id = $2
	and seal = 1

-- name: unsealed
-- By primary key. See seal.
select count(*)
from {{inbox}}
where consumer = $1
	and message_id = $2
	and seal = 1

-- name: same_fingerprint
-- By primary key.
select coalesce(fingerprint = $3, true)
from {{inbox}}
where consumer = $1
	and message_id = $2

-- name: reopen
-- By primary key. There is one writer.
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead = 1

-- name: mark_dead
-- By primary key; the row was written by this transaction.
update {{inbox}}
set dead = 1
where consumer = $1
	and message_id = $2

-- name: now
-- Reads no table.
select cast(unixepoch('subsec') * 1000000 as integer)
