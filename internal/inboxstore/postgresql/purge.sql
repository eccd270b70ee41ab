-- name: purge_ids
-- index: inbox_received, from its oldest end
-- Rows that another purge has locked are left to it. The id of a dead letter stays.
-- statement_timestamp() can be used in an index, clock_timestamp() cannot.
delete from {{inbox}}
where ctid = any (array(
	select ctid
	from {{inbox}}
	where consumer = $1
		and received_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
		and not dead
	order by received_at
	limit $3
	for update skip locked
))

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
-- handled. Rows that another purge has locked are left to it. The scalar sub-select is
-- looked up for each row; an exists could become a scan of all ids.
delete from {{inbox_failures}}
where ctid = any (array(
	select f.ctid
	from {{inbox_failures}} f
	where f.consumer = $1
		and f.message_id > $2
		and f.message_id <= $3
		and (select not i.dead from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id)
	for update of f skip locked
))

-- name: purge_failures
-- index: inbox_failures_changed, from its oldest end
-- Rows that another purge has locked are left to it.
delete from {{inbox_failures}}
where ctid = any (array(
	select ctid
	from {{inbox_failures}}
	where consumer = $1
		and changed_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
	order by changed_at
	limit $3
	for update skip locked
))

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
select message_id, (extract(epoch from received_at) * 1000000)::bigint
from {{inbox}}
where consumer = $1
	and received_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
	and not dead
order by received_at
limit $3

-- name: delete_ids
-- By the primary key. An id that was handled again meanwhile is young, and stays. Rows that
-- another purge has locked are left to it.
delete from {{inbox}}
where ctid = any (array(
	select ctid
	from {{inbox}}
	where consumer = $1
		and message_id = any ($3::text[])
		and received_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
		and not dead
	for update skip locked
))
