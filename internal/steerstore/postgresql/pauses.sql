-- name: there
-- The catalog, by the name. Unlike a read of a table that does not exist, it leaves no error in
-- the log of the server.
select to_regclass('{{pauses}}') is not null

-- name: pauses
-- By the primary key, in its order.
-- Locks nothing.
select kind, name, actor, reason, (date_part('epoch', since) * 1000000)::bigint
from {{pauses}}
order by kind, name
limit $1

-- name: paused
-- By the primary key, in its order: of one kind or of all.
-- Locks nothing.
select kind, name
from {{pauses}}
where $1::text = '' or kind = $1::text
order by kind, name
limit $2

-- name: pause_of
-- By the primary key
-- Locks nothing.
select kind, name, actor, reason, (date_part('epoch', since) * 1000000)::bigint
from {{pauses}}
where kind = $1 and name = $2

-- name: lock_pauses
-- Two operators act one after the other, so that the number of pauses stays below its bound.
-- Nothing else is locked: workers read meanwhile, and the lock needs no right on the table.
select pg_advisory_xact_lock('{{pauses}}'::regclass::oid::bigint)

-- name: count_pauses
-- By the primary key, as many entries as $1. Under lock_pauses.
select count(*)
from (
	select kind
	from {{pauses}}
	order by kind, name
	limit $1
) p

-- name: pause
-- By the primary key. Of two operators, the first has paused it.
insert into {{pauses}} (kind, name, actor, reason)
values ($1, $2, $3, $4)
on conflict do nothing

-- name: resume
-- The migrations define the function, which uses the primary key; its caller needs no right to
-- delete. Of two operators, one has resumed it.
select from {{pauses_resume}}($1, $2)
