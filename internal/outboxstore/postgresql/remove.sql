-- name: delete
-- By the primary keys (lane, id). The repeated partition expression lets the executor go
-- to the one partition. Rows are locked in the order of the arrays, which are sorted by
-- id. Two workers that still deadlock, after a takeover, get 40P01, and the caller tries
-- again. The sub-selects hide the length of the arrays from the planner, which would scan
-- and hash the whole table for a few thousand rows (90 us a row instead of 2).
delete from {{outbox}} o
using unnest(
	(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
) as c (lane, id, message_id, created_micros)
where o.lane = c.lane
	and o.id = c.id
	and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
	and o.message_id = c.message_id
	and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond';

-- name: move
-- As delete. Only what the deletion returned is inserted.
with gone as (
	delete from {{outbox}} o
	using unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) as c (lane, id, message_id, created_micros)
	where o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
)
insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
from gone;

-- name: delete_unlocked
-- As delete, but rows that others have locked are left alone. Locking costs a WAL record
-- for each row, so this is only for rows that the plain deletion has waited for without
-- success. Rows in the snapshot that were not locked here are returned, by their position
-- in the arrays: another transaction has locked them, or they were deleted meanwhile.
--
-- FOR UPDATE needs the right to update the table.
with confirmed as materialized (
	select *
	from unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) with ordinality as c (lane, id, message_id, created_micros, n)
), free as materialized (
	select o.lane, o.id, c.n
	from confirmed c
	join {{outbox}} o on o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	for update of o skip locked
), gone as (
	delete from {{outbox}} o
	using free f
	where o.lane = f.lane
		and o.id = f.id
		and ((o.id >> 16) & 3) = ((f.id >> 16) & 3)
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
)
select
	(select count(*) from gone),
	array(
		select c.n
		from confirmed c
		join {{outbox}} o on o.lane = c.lane
			and o.id = c.id
			and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
			and o.message_id = c.message_id
			and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		where c.n not in (select f.n from free f)
	);

-- name: move_unlocked
-- As delete_unlocked. Only what the deletion returned is inserted.
with confirmed as materialized (
	select *
	from unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) with ordinality as c (lane, id, message_id, created_micros, n)
), free as materialized (
	select o.lane, o.id, c.n
	from confirmed c
	join {{outbox}} o on o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	for update of o skip locked
), gone as (
	delete from {{outbox}} o
	using free f
	where o.lane = f.lane
		and o.id = f.id
		and ((o.id >> 16) & 3) = ((f.id >> 16) & 3)
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
), kept as (
	insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
	from gone
)
select
	(select count(*) from gone),
	array(
		select c.n
		from confirmed c
		join {{outbox}} o on o.lane = c.lane
			and o.id = c.id
			and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
			and o.message_id = c.message_id
			and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		where c.n not in (select f.n from free f)
	);

-- name: delete_at_# for 0 to 3
-- By the row addresses $1 in one partition of the ring, without an index. An address alone
-- does not identify a row. Before the first row is touched, $2 is compared with the digest
-- of the identities of all rows found, in the order of the addresses (a TID scan sorts
-- them). If it differs, the statement does nothing. Both scans use one snapshot, in which
-- the row at an address does not change.
--
-- In the digested bytes a message id ends with the first byte of its lane, which is NUL.
delete from {{outbox_#}} o
where o.ctid = any ((select $1::tid[])::tid[])
	and (
		select sha256(string_agg(textsend(p.message_id) || int2send(p.lane) || int8send(p.id) || timestamptz_send(p.created_at), '')) = $2::bytea
		from {{outbox_#}} p
		where p.ctid = any ((select $1::tid[])::tid[])
	);

-- name: move_at_# for 0 to 3
-- As delete_at. Only what the deletion returned is inserted.
with gone as (
	delete from {{outbox_#}} o
	where o.ctid = any ((select $1::tid[])::tid[])
		and (
			select sha256(string_agg(textsend(p.message_id) || int2send(p.lane) || int8send(p.id) || timestamptz_send(p.created_at), '')) = $2::bytea
			from {{outbox_#}} p
			where p.ctid = any ((select $1::tid[])::tid[])
		)
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
)
insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
from gone;
