-- name: command
-- By the unique index. A command that is not carried out yet is not given twice, and a
-- release that somebody has begun stays as it is.
insert into {{lane_commands}} (action, lane, topic, key)
select $1, l.lane, $3, $4
from unnest($2::smallint[]) as l (lane)
on conflict do nothing

-- name: commands
-- By the unique index, from the start of each lane: releases come first. Locks nothing.
select c.id, c.action, c.lane, c.topic, c.key, c.worker, (date_part('epoch', c.asked_at) * 1000000)::bigint
from generate_series(0, 31) as l (lane)
cross join lateral (
	select id, action, lane, topic, key, worker, asked_at
	from {{lane_commands}}
	where lane = l.lane
	order by action, topic, key
	limit $1
) c

-- name: begin_release
-- By the primary key. Of two workers, one begins it, and may do so again.
update {{lane_commands}}
set worker = $2
where id = $1 and worker in ('', $2)

-- name: end_command
-- By the primary key. Of two workers, one ends it.
delete from {{lane_commands}}
where id = $1
