-- name: purge_ids
-- index: inbox_received, from its oldest end
-- Rows that another purge has locked are left to it. The id of a dead letter stays.
delete from {{inbox}}
where ctid = any (array(
	select ctid
	from {{inbox}}
	where consumer = $1
		and received_at < clock_timestamp() - $2::bigint * interval '1 microsecond'
		and not dead
	order by received_at
	limit $3
	for update skip locked
))

-- name: purge_handled
-- By the primary keys. Rows that another purge has locked are left to it.
-- scans: inbox_failures: it is small, since few messages fail
delete from {{inbox_failures}}
where ctid = any (array(
	select f.ctid
	from {{inbox_failures}} f
	where f.consumer = $1
		and exists (select from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id and not i.dead)
	limit $2
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
		and changed_at < clock_timestamp() - $2::bigint * interval '1 microsecond'
	order by changed_at
	limit $3
	for update skip locked
))
