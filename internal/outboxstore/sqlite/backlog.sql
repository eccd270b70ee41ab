-- name: backlog
-- By the index on (lane, id), from the start of each lane: at most ?1 rows of a lane.
with recursive l (lane) as (select 0 union all select lane + 1 from l where lane < 31), b as (
	select l.lane,
		(select count(*) from (select 1 from {{outbox}} o where o.lane = l.lane order by o.id limit ?1)) as rows,
		(
			select cast(unixepoch('subsec') * 1000000 as integer) - min(o.created_at)
			from (select o.created_at from {{outbox}} o where o.lane = l.lane order by o.id limit ?1) o
		) as age
	from l
)
select lane, rows, age
from b
where rows > 0
order by lane;

-- name: backlog_scheduled
-- By the index on (deliver_at, seq), from its start: at most ?1 rows. The third column is how
-- long the first has been due.
select
	(select count(*) from (select 1 from {{scheduled}} s order by s.deliver_at, s.seq limit ?1)),
	(
		select count(*)
		from (
			select 1
			from {{scheduled}} s
			where s.deliver_at <= cast(unixepoch('subsec') * 1000000 as integer)
			order by s.deliver_at, s.seq
			limit ?1
		)
	),
	coalesce((
		select cast(unixepoch('subsec') * 1000000 as integer) - s.deliver_at
		from {{scheduled}} s
		where s.deliver_at <= cast(unixepoch('subsec') * 1000000 as integer)
		order by s.deliver_at, s.seq
		limit 1
	), 0);
