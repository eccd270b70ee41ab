-- name: read
-- Returns each lane that has rows packed in one row. $1 are the lanes, $2 is the number of
-- rows of each, $3 and $4 are the known rows, $5 the busy keys, $6 the topics whose rows come
-- hollow: payload and metadata null. Rows with more than $7 bytes come without payload and
-- metadata; a lane with such a row is read again by read_large. The migration that creates
-- the function documents how it reads.
select *
from {{outbox_read}}($1, $2, $3, $4, $5, $6, $7)
where numbers is not null;

-- name: peek
-- The lanes that have a row: the first of each, without its payload.
select lane
from {{outbox_read}}(array(select generate_series(0, 31)::smallint), 1, '{}', '{}', '{}', '{}', -1)
where numbers is not null;

-- name: read_large
-- The function's query for the few lanes that hold large rows: by the primary keys
-- (lane, id) of the partitions, merged, in one snapshot. $7 is the byte budget of a lane.
-- Hollow rows add nothing to the sum. A larger payload is not returned, so that no answer
-- is too large for its time.
--
-- It is planned at each execution (an unnamed statement): a plan kept from a time when
-- the table was empty scans and sorts, unless it may do neither. The arrays are behind
-- sub-selects, so that planning does not weigh each element (36 ms with 4,000 known
-- rows), and "not in" is a hashed subplan on every version.
--
-- The limit appears twice. The inner one hides its number: if that is above the rows
-- that old statistics predict for a lane, the planner would fetch the whole lane and
-- sort it. The outer one shows it: without it the estimate is a tenth of the lane, and
-- a large backlog makes the planner compile the statement (JIT) at each execution. One
-- condition instead of two halves the estimate for the same reason.
select m.lane, int8send(m.id) || timestamptz_send(m.created_at) || tidsend(m.tid), m.topic, m.message_id, m.key, m.payload is null,
	case when octet_length(m.payload) <= $7 then m.payload end, m.metadata,
	case when octet_length(m.payload) > $7 then octet_length(m.payload) else 0 end
from unnest($1::smallint[]) as l (lane)
cross join lateral (
	select *
	from (
		select f.*,
			sum(octet_length(f.payload) + octet_length(f.metadata))
				over (rows between unbounded preceding and 1 preceding) as bytes_before
		from (
			select *
			from (
				select o.ctid as tid, o.lane, o.id, o.topic, o.message_id, o.key, o.created_at,
					case when o.topic not in (select unnest((select $6::text[]))) then o.payload end as payload,
					case when o.topic not in (select unnest((select $6::text[]))) then o.metadata end as metadata
				from {{outbox}} o
				where o.lane = l.lane
					and case
						when (select $3::bigint[])[width_bucket(o.id, (select $3::bigint[]))] = o.id
							and o.created_at = timestamptz 'epoch' + (select $4::bigint[])[width_bucket(o.id, (select $3::bigint[]))] * interval '1 microsecond'
						then false
						else o.key not in (select unnest((select $5::text[])))
					end
				order by o.id
				limit (select $2::bigint)
			) h
			limit $2
		) f
	) w
	where coalesce(w.bytes_before, 0) < $7
) m;

-- name: read_piece
-- By the primary keys (lane, id). The server reads only the piece of a payload that is
-- stored out of line and not compressed. A row that was changed has another ctid: no
-- message is assembled from pieces of two.
select substring(o.payload from $5 for $6)
from {{outbox}} o
where o.lane = $1
	and o.id = $2
	and o.created_at = timestamptz 'epoch' + $3 * interval '1 microsecond'
	and o.message_id = $4
	and o.ctid = $7::tid;

-- name: read_ahead
-- $1 are the lanes, $2 is the number of rows of each, $3 and $4 are the known rows, $5
-- the busy keys, $6 the topics to leave out, $7 is the bytes of a lane (a row of more
-- is left out), $8 are the topics to take, $9 the number of the newest rows of others,
-- $10 the newest rows of each lane to choose from, $11 is true if keys do not order
-- rows, and $12 is the number of rows among which to look for earlier ones of their
-- keys.
--
-- The newest rows come from the primary keys (lane, id) of the ring's partitions,
-- merged and backwards. Earlier rows of their keys are searched in one pass over the
-- table: in lane order each row would be on another page. The numbered rows are narrow;
-- payload and metadata are fetched for the chosen rows only, by their ids. Everything
-- uses one snapshot, so the first unknown row of a key is its first row, if the pass
-- has reached the end. Rows without a key are only counted, and offset 0 keeps the planner
-- from computing each key twice. Sub-selects and limits are as in read_large.
-- scans: outbox: one pass, of at most $12 rows, looks for the earlier rows of the keys
with newest as materialized (
	select l.lane, l.turn, n.*
	from unnest($1::smallint[]) with ordinality as l (lane, turn)
	cross join lateral (
		select *
		from (
			select o.id, o.created_at, o.topic, o.key
			from {{outbox}} o
			where o.lane = l.lane
			order by o.id desc
			limit (select $10::bigint)
		) n
		limit $10
	) n
), known as materialized (
	select k.id, timestamptz 'epoch' + k.created_micros * interval '1 microsecond' as created_at
	from unnest((select $3::bigint[]), (select $4::bigint[])) as k (id, created_micros)
), fresh as materialized (
	select n.*, n.topic in (select unnest((select $8::text[]))) as wanted
	from newest n
	where case
		when (n.id, n.created_at) in (select k.id, k.created_at from known k) then false
		when n.key in (select unnest((select $5::text[]))) then false
		else n.topic not in (select unnest((select $6::text[])))
	end
), keys as materialized ( -- and one group of all rows that are not asked for, to count them
	select s.key, count(*) as scanned,
		min(case when s.key is null then null when (s.id, s.created_at) in (select k.id, k.created_at from known k) then null else s.id end) as first
	from (
		select o.id, o.created_at, case when o.key = '' then null when o.key in (select f.key from fresh f where f.key <> '') then o.key end as key
		from (
			select *
			from (
				select o.id, o.created_at, o.key
				from {{outbox}} o
				limit (select $12::bigint)
			) o
			limit $12
		) o
		offset 0
	) s
	group by s.key
), chosen as materialized (
	select *
	from (
		select f.*, row_number() over (partition by f.lane, f.wanted order by case when f.wanted then f.id else -f.id end) as nth
		from fresh f
		where $11::bool or f.key = '' or (f.key, f.id) in (
			select k.key, k.first
			from keys k
			where (select sum(k.scanned) from keys k) < $12
		)
	) f
	where f.nth <= case when f.wanted then $2::bigint else $9::bigint end
)
select m.lane, int8send(m.id) || timestamptz_send(m.created_at) || tidsend(m.tid), m.topic, m.message_id, m.key, false, m.payload, m.metadata, 0
from (
	select o.*, c.turn,
		sum(octet_length(o.payload) + octet_length(o.metadata))
			over (partition by c.lane order by c.wanted desc, o.id rows between unbounded preceding and 1 preceding) as bytes_before
	from chosen c
	cross join lateral (
		select o.ctid as tid, o.*
		from {{outbox}} o
		where o.lane = c.lane and o.id = c.id and o.created_at = c.created_at
			and octet_length(o.payload) + octet_length(o.metadata) <= $7
		offset 0
	) o
) m
where coalesce(m.bytes_before, 0) < $7
order by m.turn, m.id;
