-- The statements of this file bound (state, died_at) by rows: for state = s.state the planner would
-- walk dead_letters_died from its start, past every letter, to find that a state has none.

-- name: count_open
-- index: dead_letters_state, from its start in each state: at most $1 rows of each.
select s.state, l.source, l.consumer, count(*), (extract(epoch from clock_timestamp() - min(l.died_at)) * 1000000)::bigint
from unnest(array['dead', 'held', 'replaying', 'discarding']) as s (state)
cross join lateral (
	select d.source, d.consumer, d.died_at
	from {{dead_letters}} d
	where (d.state, d.died_at) >= (s.state, '-infinity') and (d.state, d.died_at) <= (s.state, 'infinity')
	order by d.state, d.died_at, d.id
	limit $1
) l
group by s.state, l.source, l.consumer
order by s.state, l.source, l.consumer;

-- name: groups
-- index: dead_letters_state, from its newest end in each state: at most $1 rows of each. Then by
-- the primary key, the newest letter of each of at most $2 groups.
with open as (
	select l.fingerprint, l.id, l.died_at
	from unnest(array['dead', 'held', 'replaying', 'discarding']) as s (state)
	cross join lateral (
		select d.fingerprint, d.id, d.died_at
		from {{dead_letters}} d
		where (d.state, d.died_at) >= (s.state, '-infinity') and (d.state, d.died_at) <= (s.state, 'infinity')
		order by d.state desc, d.died_at desc, d.id desc
		limit $1
	) l
), alike as (
	select fingerprint, count(*) as n, min(died_at) as first, max(died_at) as last, max(id) as newest
	from open
	group by fingerprint
	order by count(*) desc, max(died_at) desc
	limit $2
)
select a.fingerprint, a.n, (extract(epoch from a.first) * 1000000)::bigint, (extract(epoch from a.last) * 1000000)::bigint,
	a.newest, n.source, n.consumer, n.topic, n.reason, left(n.error, 4096)
from alike a
cross join lateral (
	select d.source, d.consumer, d.topic, d.reason, d.error
	from {{dead_letters}} d
	where d.id = a.newest
	offset 0
) n
order by a.n desc, a.last desc;

-- name: stuck
-- index: dead_letters_state, from its start in each state: at most $1 rows of each.
select s.state, l.source, l.consumer, count(*), (extract(epoch from clock_timestamp() - min(l.acted_at)) * 1000000)::bigint
from unnest(array['replaying', 'discarding']) as s (state)
cross join lateral (
	select d.source, d.consumer, d.acted_at
	from {{dead_letters}} d
	where (d.state, d.died_at) >= (s.state, '-infinity') and (d.state, d.died_at) <= (s.state, 'infinity')
	order by d.state, d.died_at, d.id
	limit $1
) l
where l.acted_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
group by s.state, l.source, l.consumer
order by s.state, l.source, l.consumer;
