-- name: count_consumer
-- Handled ids by the partial index on (consumer, received_at), failure records by the index on
-- (consumer, changed_at) with a probe of the primary key for each, refused messages by the primary
-- key: at most $2 entries of each kind.
select
	(select count(*) from (select 1 from {{inbox}} i where i.consumer = $1 and not i.dead order by i.received_at limit $2) h),
	coalesce((select cast(unixepoch('subsec') * 1000000 as integer) - i.received_at from {{inbox}} i where i.consumer = $1 and not i.dead order by i.received_at limit 1), 0),
	coalesce((select cast(unixepoch('subsec') * 1000000 as integer) - i.received_at from {{inbox}} i where i.consumer = $1 and not i.dead order by i.received_at desc limit 1), 0),
	(
		select count(*)
		from (select f.message_id from {{inbox_failures}} f where f.consumer = $1 and f.failures + f.unavailable > 0 order by f.changed_at limit $2) r
		where (select i.message_id from {{inbox}} i where i.consumer = $1 and i.message_id = r.message_id limit 1) is null
	),
	coalesce((select sum(r.total) from (select f.total from {{inbox_refused}} f where f.consumer = $1 order by f.topic, f.reason limit $2) r), 0)

-- name: handled_at
-- By the primary key.
select i.received_at, i.dead
from {{inbox}} i
where i.consumer = $1 and i.message_id = $2

-- name: handled
-- By the primary key. Locks nothing.
select i.message_id
from {{inbox}} i
where i.consumer = $1
	and i.message_id in (select value from json_each($2))
	and not i.dead
