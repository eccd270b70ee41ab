-- name: remove
-- Confirmed rows. By primary key. Right whoever holds the lane: it needs no fence. The
-- search for the next head is left to a later statement, with a newer snapshot;
-- whether the first row was deleted is returned for that.
with gone as (
	delete from {{parked}} p
	using unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) as c (lane, id, message_id, created_micros)
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at,
		p.next_at is not null or p.held as first
)
select lane, key, count(*), bool_or(first) from gone group by lane, key;

-- name: remove_into_history
-- As remove. Inserts what the delete returned.
with gone as (
	delete from {{parked}} p
	using unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) as c (lane, id, message_id, created_micros)
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at,
		p.next_at is not null or p.held as first
), kept as (
	insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
	from gone
)
select lane, key, count(*), bool_or(first) from gone group by lane, key;

-- name: close_dead_letters
-- By the partial index of open dead letters, a probe for each row, and by primary key.
-- A message that the broker has confirmed is no dead letter, even if somebody gave it
-- up meanwhile. A separate statement, since the deletion may have waited for that.
update {{dead_letters}} d
set state = 'replayed', version = d.version + 1, closed_at = clock_timestamp(), acted_at = clock_timestamp(),
	acted_by = 'relay', acted_reason = 'confirmed by the broker after it was given up'
from (
	select m.id
	from unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) as c (lane, id, message_id, created_micros)
	cross join lateral (
		select d.id
		from {{dead_letters}} d
		where d.source = 'relay' and d.closed_at is null
			and d.lane = c.lane
			and d.row_id = c.id
			and d.message_id = c.message_id
			and d.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		limit 10
	) m
) open
where d.id = open.id and coalesce(d.closed_at, 'infinity') = 'infinity';

-- name: promote_heads
-- The first row of each key, by (lane, key, id), gets a time, once it is not locked
-- any more: a writer of a row without a time has locked the head of its key in the
-- same statement, so this later statement sees each such row. Keys without rows are
-- returned.
with heads as (
	select k.lane, k.key, h.id, h.message_id, h.created_at, h.next_at, h.held
	from unnest((select $1::smallint[]), (select $2::text[])) as k (lane, key)
	left join lateral (
		select p.id, p.message_id, p.created_at, p.next_at, p.held
		from {{parked}} p
		where p.lane = k.lane and p.key = k.key
		order by p.id
		limit 1
		for update
	) h on true
), promoted as (
	update {{parked}} p
	set next_at = clock_timestamp()
	from heads h
	where p.lane = h.lane and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and h.next_at is null and not h.held
)
select lane, key from heads where id is null;
