-- name: command
-- By the unique index. A command that is not carried out yet is not given twice, and a
-- release that somebody has begun stays as it is. One writer.
insert into {{lane_commands}} (action, lane, topic, key)
select $1, value, $3, $4
from json_each($2)
where true
on conflict do nothing

-- name: commands
-- By the unique index, from the start of each lane: releases come first.
with recursive lanes (lane) as (
	select 0
	union all
	select lane + 1
	from lanes
	where lane < 31
)
select c.id, c.action, c.lane, c.topic, c.key, c.worker, c.asked_at
from lanes l
join {{lane_commands}} c on c.id in (
	select id
	from {{lane_commands}}
	where lane = l.lane
	order by action, topic, key
	limit $1
)

-- name: begin_release
-- By the primary key. One writer: of two workers, one begins it, and may do so again.
update {{lane_commands}}
set worker = $2
where id = $1 and worker in ('', $2)

-- name: end_command
-- By the primary key. One writer: of two workers, one ends it.
delete from {{lane_commands}}
where id = $1
