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

-- name: purge_handled
-- By the primary keys. There is one writer.
delete from {{inbox_failures}}
where consumer = $1
	and message_id in (
		select f.message_id
		from {{inbox_failures}} f
		where f.consumer = $1
			and exists (select 1 from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id and not i.dead)
		limit $2
	)

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
