-- name: there
-- A read of a table that does not exist is an error, and costs nothing.
select 1 as pauses

-- name: pauses
-- By the primary key, in its order.
select kind, name, actor, reason, since
from {{pauses}}
order by kind, name
limit $1

-- name: paused
-- By the primary key, in its order: of one kind or of all.
select kind, name
from {{pauses}}
where $1 = '' or kind = $1
order by kind, name
limit $2

-- name: pause_of
-- By the primary key
select kind, name, actor, reason, since
from {{pauses}}
where kind = $1 and name = $2

-- name: lock_pauses
-- SQLite has one writer at a time.
select 1

-- name: count_pauses
-- By the primary key, as many entries as $1. One writer: nobody adds any meanwhile.
select count(*)
from (
	select kind
	from {{pauses}}
	order by kind, name
	limit $1
)

-- name: pause
-- By the primary key. One writer: of two operators, the first has paused it.
insert into {{pauses}} (kind, name, actor, reason)
values ($1, $2, $3, $4)
on conflict do nothing

-- name: resume
-- By the primary key. One writer: of two operators, one has resumed it.
delete from {{pauses}}
where kind = $1 and name = $2
