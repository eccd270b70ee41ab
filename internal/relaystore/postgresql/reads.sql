-- Each is planned at its execution. Arrays and inner limits are behind sub-selects, so
-- that the planner uses an index in its order, whatever its statistics of the table.

-- name: keys
-- By the partial index (lane, key) of heads: the rows behind them cost nothing. Arrays
-- are behind sub-selects in all reads, so that the planner uses an index in its order,
-- whatever its statistics of the table.
select p.lane, p.key
from {{parked}} p
where p.lane = any ((select $1::smallint[])::smallint[])
	and p.key > ''
	and (p.next_at is not null or p.held);

-- name: topics_due
-- By the partial index (lane, topic, next_at), which holds only heads: from each topic
-- to the next, at most $3 times in a lane, from the topic after $2 on. The condition
-- that all lanes are between 0 and 31 makes the planner expect few rows of the
-- recursion; otherwise it would compile.
with recursive t (lane, topic, next_at, nth) as (
	select l.lane, m.topic, m.next_at, 1
	from unnest((select $1::smallint[])) as l (lane)
	cross join lateral (
		select p.topic, p.next_at
		from {{parked}} p
		where p.lane = l.lane and p.next_at is not null and p.topic > $2
		order by p.topic, p.next_at
		limit 1
	) m
	union all
	select t.lane, m.topic, m.next_at, t.nth + 1
	from t
	cross join lateral (
		select p.topic, p.next_at
		from {{parked}} p
		where p.lane = t.lane and p.next_at is not null and p.topic > t.topic
		order by p.topic, p.next_at
		limit 1
	) m
	where t.nth < $3
)
select t.lane, t.topic, ceil(date_part('epoch', t.next_at - statement_timestamp()) * 1000000)::bigint, t.nth
from t
where t.lane between 0 and 31;

-- name: due
-- Of the lanes $1 and their topics $6: the due heads and the first one that is not
-- due, by the partial index (lane, topic, next_at), and the rows of their keys by
-- (lane, key, id). $2 and $7 are the rows to pass over, $3 is the number of heads plus
-- one, which shows that there are more, $4 the rows of a key, $5 their bytes, $8 the
-- bytes of all, of which a row takes $10 besides its own. A payload of more than $9
-- bytes is not returned, and keys whose head has more than $11 are passed over. An
-- unkeyed row is alone. Topics take turns, so that none waits for the backlog of
-- another one. Locks nothing.
with known as materialized (
	select k.id, timestamptz 'epoch' + k.created * interval '1 microsecond' as created_at
	from unnest((select $2::bigint[]), (select $7::bigint[])) as k (id, created)
)
select wait, lane, id, topic, message_id, key, case when missing = 0 then payload end, metadata, created_micros,
	attempts, tried, crashed, unanswered, held, age, late, nth, missing, tid
from (
	select h.wait, h.nth, r.*,
		sum(r.bytes) over (order by h.nth, r.id rows between unbounded preceding and 1 preceding) as all_before
	from (
		select m.lane, m.id, m.key,
			ceil(date_part('epoch', m.next_at - statement_timestamp()) * 1000000)::bigint as wait,
			row_number() over (order by case when m.next_at <= statement_timestamp() then m.turn end, m.next_at, m.id) as nth
		from (
			select m.*, row_number() over (partition by w.topic order by m.next_at, m.id) as turn
			from unnest((select $1::smallint[]), (select $6::text[])) as w (lane, topic)
			cross join lateral (
				select *
				from (
					select p.lane, p.id, p.key, p.next_at
					from {{parked}} p
					where p.lane = w.lane
						and p.topic = w.topic
						and p.next_at is not null
						and (p.id, p.created_at) not in (select k.id, k.created_at from known k)
						and octet_length(p.payload) <= (select $11::bigint)
					order by p.next_at
					limit (select $3::bigint)
				) n
				limit $3
			) m
		) m
		order by case when m.next_at <= statement_timestamp() then m.turn end, m.next_at, m.id
		limit $3
	) h
	left join lateral (
		select *
		from (
			select f.*,
				(date_part('epoch', f.created_at) * 1000000)::bigint as created_micros,
				(date_part('epoch', clock_timestamp() - f.parked_at) * 1000000)::bigint as age,
				(date_part('epoch', clock_timestamp() - f.next_at) * 1000000)::bigint as late,
				jsonb_array_length(f.errors) > 0 as tried, tidsend(f.at) as tid,
				case when octet_length(f.payload) > $9 then octet_length(f.payload) else 0 end as missing,
				octet_length(f.metadata) + case when octet_length(f.payload) > $9 then 0 else octet_length(f.payload) end + (select $10::bigint) as bytes,
				sum(octet_length(f.payload) + octet_length(f.metadata))
					over (rows between unbounded preceding and 1 preceding) as bytes_before
			from (
				select p.*, p.ctid as at
				from {{parked}} p
				where p.lane = h.lane
					and p.key = h.key
					and p.id >= h.id
					and (p.held or (p.id, p.created_at) not in (select k.id, k.created_at from known k))
				order by p.id
				limit case when h.key = '' then 1 else (select $4::bigint) end
			) f
		) w
		where coalesce(w.bytes_before, 0) < $5
	) r on h.wait <= 0 and h.nth < $3
) x
where coalesce(all_before, 0) < $8 or id is null
order by nth, id;

-- name: read_piece
-- By primary key. The ctid excludes a row that has changed meanwhile.
select substring(p.payload from $5 for $6)
from {{parked}} p
where p.lane = $1 and p.id = $2 and p.message_id = $3 and p.created_at = timestamptz 'epoch' + $4 * interval '1 microsecond'
	and p.ctid = $7::tid;

-- name: find
-- By the primary keys; of outbox in one partition. Locks nothing.
select p.lane, p.id, p.topic, p.message_id, p.key,
	(date_part('epoch', p.created_at) * 1000000)::bigint, p.attempts, jsonb_array_length(p.errors) > 0, p.crashed, p.unanswered,
	(date_part('epoch', clock_timestamp() - p.parked_at) * 1000000)::bigint, true
from {{parked}} p
where p.lane = $1 and p.id = $2
union all
select o.lane, o.id, o.topic, o.message_id, o.key,
	(date_part('epoch', o.created_at) * 1000000)::bigint, 0, false, false, false, 0, false
from {{outbox}} o
where o.lane = $1 and o.id = $2 and ((o.id >> 16) & 3) = (($2::bigint >> 16) & 3)
limit 1;

-- name: commands
-- By the partial index of commands. The oldest message first, whichever command was
-- given first: if a key is replayed as a whole, its messages keep their order.
select m.id, m.lane, m.key
from unnest((select $1::smallint[])) as l (lane)
cross join lateral (
	select *
	from (
		select d.id, d.lane, d.key, d.row_id
		from {{dead_letters}} d
		where d.lane = l.lane and d.source = 'relay' and d.state in ('replaying', 'discarding')
		order by d.row_id, d.id
		limit (select $2::bigint)
	) c
	limit $2
) m
order by m.row_id, m.id
limit $2;

-- name: dead_letter_keys
-- By primary key, and by (lane, key, id).
select k.lane, k.key, (select true from {{parked}} p where p.lane = k.lane and p.key = k.key limit 1) is not null
from (
	select distinct d.lane, d.key
	from {{dead_letters}} d
	where d.id = any ($1::bigint[]) and d.source = 'relay' and d.key <> ''
) k;

-- name: find_other_topics
-- By the primary key of each partition, backwards: what was not read yet comes last.
-- Ends at the first match in a lane, or after $3 rows.
select m.lane, m.id
from unnest((select $1::smallint[])) as l (lane)
cross join lateral (
	select n.lane, n.id
	from (
		select o.lane, o.id, o.topic
		from {{outbox}} o
		where o.lane = l.lane
		order by o.id desc
		limit (select $3::bigint)
	) n
	where n.topic not in (select unnest((select $2::text[])))
	limit 1
) m;
