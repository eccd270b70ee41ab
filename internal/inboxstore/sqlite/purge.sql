-- name: purge_ids
-- index: inbox_received, from its oldest end
-- There is one writer. The id of a dead letter stays.
delete from {{inbox}}
where consumer = $1
	and message_id in (
		select message_id
		from {{inbox}}
		where consumer = $1
			and received_at < cast(unixepoch('subsec') * 1000000 as integer) - $2
			and dead = 0
		order by received_at
		limit $3
	)

-- name: failures_after
-- By primary key.
select count(*), coalesce(max(message_id), '')
from (
	select message_id
	from {{inbox_failures}}
	where consumer = $1
		and message_id > $2
	order by message_id
	limit $3
) as piece

-- name: purge_handled
-- By the primary keys, in a piece of the table: many messages may fail that are never
-- handled. There is one writer.
delete from {{inbox_failures}}
where consumer = $1
	and message_id > $2
	and message_id <= $3
	and (select not i.dead from {{inbox}} i where i.consumer = {{inbox_failures}}.consumer and i.message_id = {{inbox_failures}}.message_id)

-- name: purge_failures
-- index: inbox_failures_changed, from its oldest end
-- There is one writer.
delete from {{inbox_failures}}
where consumer = $1
	and message_id in (
		select message_id
		from {{inbox_failures}}
		where consumer = $1
			and changed_at < cast(unixepoch('subsec') * 1000000 as integer) - $2
		order by changed_at
		limit $3
	)

-- name: consumers
-- By the primary key: one probe for each consumer, in ascending order.
with recursive c (consumer) as (
	select (select min(i.consumer) from {{inbox}} i where i.consumer > $1)
	union all
	select (select min(i.consumer) from {{inbox}} i where i.consumer > c.consumer)
	from c
	where c.consumer is not null
)
select consumer
from c
where consumer is not null
limit $2

-- name: failing_consumers
-- As consumers, of those with failure records.
with recursive c (consumer) as (
	select (select min(f.consumer) from {{inbox_failures}} f where f.consumer > $1)
	union all
	select (select min(f.consumer) from {{inbox_failures}} f where f.consumer > c.consumer)
	from c
	where c.consumer is not null
)
select consumer
from c
where consumer is not null
limit $2

-- name: old_ids
-- index: inbox_received, from its oldest end. Takes no lock; delete_ids checks again.
select message_id, received_at
from {{inbox}}
where consumer = $1
	and received_at < cast(unixepoch('subsec') * 1000000 as integer) - $2
	and dead = 0
order by received_at
limit $3

-- name: delete_ids
-- By the primary key. An id that was handled again meanwhile is young, and stays. There is
-- one writer.
delete from {{inbox}}
where consumer = $1
	and message_id in (select value from json_each($3))
	and received_at < cast(unixepoch('subsec') * 1000000 as integer) - $2
	and dead = 0
