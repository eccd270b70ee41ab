-- name: command
-- By the unique index. A command that is not carried out yet is not given twice, and a
-- release that somebody has begun stays as it is.
insert into {{lane_commands}} (action, lane, topic, key)
select $1, l.lane, $3, $4
from unnest($2::smallint[]) as l (lane)
on conflict do nothing

-- name: commands
-- By the primary key, from its start. Locks nothing.
select id, action, lane, topic, key, worker, (date_part('epoch', asked_at) * 1000000)::bigint
from {{lane_commands}}
order by id
limit $1

-- name: begin_release
-- By the primary key. Of two workers, one begins it, and may do so again.
update {{lane_commands}}
set worker = $2
where id = $1 and worker in ('', $2)

-- name: end_command
-- By the primary key. Of two workers, one ends it.
delete from {{lane_commands}}
where id = $1
