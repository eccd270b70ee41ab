-- name: backlog
-- By the primary keys (lane, id), from the start of each lane: at most $1 rows of a lane.
-- Lanes without rows are left out.
select l.lane, b.rows, b.age
from generate_series(0, 31) as l (lane)
cross join lateral (
	select count(*) as rows, (extract(epoch from clock_timestamp() - min(o.created_at)) * 1000000)::bigint as age
	from (
		select o.created_at
		from {{outbox}} o
		where o.lane = l.lane
		order by o.id
		limit $1
	) o
) b
where b.rows > 0
order by l.lane;

-- name: backlog_scheduled
-- By the primary key (deliver_at, seq), from its start: at most $1 rows. The third column is how
-- long the first has been due.
select
	(select count(*) from (select from {{scheduled}} s order by s.deliver_at, s.seq limit $1) a),
	(select count(*) from (select from {{scheduled}} s where s.deliver_at <= statement_timestamp() order by s.deliver_at, s.seq limit $1) d),
	coalesce((
		select (extract(epoch from statement_timestamp() - s.deliver_at) * 1000000)::bigint
		from {{scheduled}} s
		where s.deliver_at <= statement_timestamp()
		order by s.deliver_at, s.seq
		limit 1
	), 0);

-- name: estimate
-- What the statistics of the server say about the rows of the outbox. They are as old as the last
-- report of the sessions that wrote, or 0 after a crash, until it is analyzed. Rows that a session
-- reports after that count twice until it is analyzed again.
select coalesce(sum(pg_stat_get_live_tuples(i.inhrelid)), 0)::bigint
from pg_inherits i
where i.inhparent = '{{outbox}}'::regclass;
