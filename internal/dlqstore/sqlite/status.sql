-- name: count_open
-- index: dead_letters_state, from its start in each state: at most ?1 rows of each.
select state, source, consumer, count(*), cast(unixepoch('subsec') * 1000000 as integer) - min(died_at)
from (
	select * from (select d.state, d.source, d.consumer, d.died_at from {{dead_letters}} d where d.state = 'dead' order by d.died_at, d.id limit ?1)
	union all
	select * from (select d.state, d.source, d.consumer, d.died_at from {{dead_letters}} d where d.state = 'held' order by d.died_at, d.id limit ?1)
	union all
	select * from (select d.state, d.source, d.consumer, d.died_at from {{dead_letters}} d where d.state = 'replaying' order by d.died_at, d.id limit ?1)
	union all
	select * from (select d.state, d.source, d.consumer, d.died_at from {{dead_letters}} d where d.state = 'discarding' order by d.died_at, d.id limit ?1)
)
group by state, source, consumer
order by state, source, consumer;

-- name: groups
-- index: dead_letters_state, from its newest end in each state: at most ?1 rows of each. Then by
-- the primary key, the newest letter of each of at most ?2 groups.
with open as (
	select * from (select d.fingerprint, d.id, d.died_at from {{dead_letters}} d where d.state = 'dead' order by d.died_at desc, d.id desc limit ?1)
	union all
	select * from (select d.fingerprint, d.id, d.died_at from {{dead_letters}} d where d.state = 'held' order by d.died_at desc, d.id desc limit ?1)
	union all
	select * from (select d.fingerprint, d.id, d.died_at from {{dead_letters}} d where d.state = 'replaying' order by d.died_at desc, d.id desc limit ?1)
	union all
	select * from (select d.fingerprint, d.id, d.died_at from {{dead_letters}} d where d.state = 'discarding' order by d.died_at desc, d.id desc limit ?1)
), alike as (
	select fingerprint, count(*) as n, min(died_at) as first, max(died_at) as last, max(id) as newest
	from open
	group by fingerprint
	order by count(*) desc, max(died_at) desc
	limit ?2
)
select a.fingerprint, a.n, a.first, a.last, a.newest, d.source, d.consumer, d.topic, d.reason, substr(d.error, 1, 4096)
from alike a
join {{dead_letters}} d on d.id = a.newest
order by a.n desc, a.last desc;

-- name: stuck
-- index: dead_letters_state, from its start in each state: at most ?1 rows of each.
select state, source, consumer, count(*), cast(unixepoch('subsec') * 1000000 as integer) - min(acted_at)
from (
	select * from (select d.state, d.source, d.consumer, d.acted_at from {{dead_letters}} d where d.state = 'replaying' order by d.died_at, d.id limit ?1)
	union all
	select * from (select d.state, d.source, d.consumer, d.acted_at from {{dead_letters}} d where d.state = 'discarding' order by d.died_at, d.id limit ?1)
)
where acted_at < cast(unixepoch('subsec') * 1000000 as integer) - ?2
group by state, source, consumer
order by state, source, consumer;
