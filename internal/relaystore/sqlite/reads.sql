-- name: keys
-- By the partial index (lane, key) of heads: the rows behind them cost nothing.
select p.lane, p.key
from {{parked}} p
where p.lane in (select value from json_each(?1))
	and p.key > ''
	and (p.next_at is not null or p.held);

-- name: topics_due
-- By the partial index (lane, topic, next_at), which holds only heads, from each topic
-- to the next, with the time of its first.
with recursive t (lane, topic, nth) as (
	select l.value, (
		select p.topic from {{parked}} p where p.lane = l.value and p.next_at is not null and p.topic > ?2 order by p.topic limit 1
	), 1
	from json_each(?1) l
	union all
	select t.lane, (
		select p.topic
		from {{parked}} p
		where p.lane = t.lane and p.next_at is not null and p.topic > t.topic
		order by p.topic
		limit 1
	), t.nth + 1
	from t
	where t.topic is not null and t.nth < ?3
)
select lane, topic, (
	select p.next_at from {{parked}} p where p.lane = t.lane and p.topic = t.topic and p.next_at is not null order by p.next_at limit 1
) - cast(unixepoch('subsec') * 1000000 as integer), nth
from t
where topic is not null;

-- name: heads
-- By the partial index (lane, topic, next_at). It is read no further than needed.
select lane, id, key, next_at - cast(unixepoch('subsec') * 1000000 as integer), created_at
from {{parked}}
where lane = ?1 and topic = ?2 and next_at is not null
order by next_at;

-- name: rows
-- By the index (lane, key, id). It is read no further than needed.
select lane, id, topic, message_id, key, payload, metadata, created_at,
	attempts, json_array_length(errors) > 0, crashed, unanswered, held, cast(unixepoch('subsec') * 1000000 as integer) - parked_at,
	coalesce(cast(unixepoch('subsec') * 1000000 as integer) - next_at, 0)
from {{parked}}
where lane = ?1 and key = ?2 and id >= ?3
order by id;

-- name: find
-- By the primary keys.
select lane, id, topic, message_id, key, created_at, attempts, json_array_length(errors) > 0, crashed, unanswered, cast(unixepoch('subsec') * 1000000 as integer) - parked_at, 1
from {{parked}}
where lane = ?1 and id = ?2
union all
select lane, id, topic, message_id, key, created_at, 0, 0, 0, 0, 0, 0
from {{outbox}}
where lane = ?1 and id = ?2
limit 1;

-- name: read_piece
-- By primary key.
select substr(payload, ?5, ?6) from {{parked}} where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4;

-- name: commands
-- By the partial index of commands, at most ?2 of each lane, and by primary key. The oldest
-- message first, whichever command was given first: if a key is replayed as a whole, its
-- messages keep their order.
select d.id, d.lane, d.key
from json_each(?1) l
cross join {{dead_letters}} d
where d.id in (
	select c.id
	from {{dead_letters}} c
	where c.lane = l.value and c.source = 'relay' and c.state in ('replaying', 'discarding')
	order by c.row_id, c.id
	limit ?2
)
order by d.row_id, d.id
limit ?2;

-- name: find_other_topics
-- By the index (lane, id), backwards: what was not read yet comes last. Ends at the
-- first match, or after ?3 rows.
select n.id
from (select o.id, o.topic from {{outbox}} o where o.lane = ?1 order by o.id desc limit ?3) n
where n.topic not in (select t.value from json_each(?2) t)
limit 1;

-- name: has_key
-- By the index (lane, key, id).
select exists (select 1 from {{parked}} where lane = ?1 and key = ?2);

-- name: find_dead_letter
-- By primary key.
select state, key, row_id, message_id, created_at
from {{dead_letters}}
where id = ?1 and lane = ?2 and source = 'relay';

-- name: rows_of_keys
-- By the index (lane, id), from the start of the lane.
select id, message_id, created_at
from {{outbox}}
where lane = ?1 and key in (select value from json_each(?2))
order by id
limit ?3;

-- name: highest_id
-- For each lane one probe of the index (lane, id) of parked and of the partial index
-- of open dead letters: those count while their messages can come back. An id that is
-- 2^48 or more ahead of the sequence was never given out (see the check in package
-- outbox), and does not count.
with recursive l (lane) as (select 0 union all select lane + 1 from l where lane < 31),
b (bound) as (
	select min(coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0), 9223372036854775807 - (1 << 48)) + (1 << 48)
)
select max(
	coalesce((select p.id from {{parked}} p where p.lane = l.lane and p.id <= b.bound order by p.id desc limit 1), 0),
	coalesce((
		select d.row_id
		from {{dead_letters}} d
		where d.source = 'relay' and d.closed_at is null and d.lane = l.lane and d.row_id <= b.bound
		order by d.row_id desc
		limit 1
	), 0)
) as id
from l, b
order by id desc
limit 1;
