-- name: check_sequence
-- The highest id of each lane is one probe of an index, and so is that of each day of the
-- history. The fourth column is whether the sequence of scheduled messages is behind:
-- those with the same due time are ordered by it. No index serves its highest value; both
-- ends of the primary key approximate it well enough.
--
-- An id that is 2^48 or more ahead of the sequence was never given out: at a million a
-- second that takes nine years, and a sequence that was left behind began at 1. The
-- writer of the row chose the id. It blocks nothing, and no sequence is set to it.
-- scans: outbox_id: a sequence has one row
with possible (id) as (
	select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48)
	from {{outbox_id}} s
), possible_seq (seq) as (
	select least(coalesce(pg_sequence_last_value(pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass), 0), 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48)
)
select
	(select s.last_value - case when s.is_called then 0 else 1 end from {{outbox_id}} s),
	(select q.seqcache from pg_sequence q where q.seqrelid = '{{outbox_id}}'::regclass),
	(
		select greatest(
			(
				select coalesce(max(m.id), 0)
				from generate_series(0, 31) as l (lane)
				cross join lateral (
					select o.id
					from {{outbox}} o
					where o.lane = l.lane and o.id <= (select p.id from possible p)
					order by o.id desc
					limit 1
				) m
			),
			(select coalesce(max(h.id), 0) from {{outbox_history}} h where h.id <= (select p.id from possible p))
		)
	),
	coalesce(pg_sequence_last_value(pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass), 0) < (
		select coalesce(max(e.seq), 0)
		from (
			(select s.seq from {{scheduled}} s order by s.deliver_at, s.seq limit 100)
			union all
			(select s.seq from {{scheduled}} s order by s.deliver_at desc, s.seq desc limit 100)
		) e
		where e.seq <= (select p.seq from possible_seq p)
	),
	pg_is_in_recovery(),
	current_setting('transaction_read_only')::boolean;

-- name: forged
-- By the same indexes as check_sequence. The orders keep the planner from a scan that ends
-- after ten rows, of which there are none.
-- scans: outbox_id: a sequence has one row
with possible (id) as (
	select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48)
	from {{outbox_id}} s
)
select o.lane, o.id, o.message_id
from generate_series(0, 31) as l (lane)
cross join lateral (
	select o.lane, o.id, o.message_id
	from {{outbox}} o
	where o.lane = l.lane and o.id > (select p.id from possible p)
	order by o.id desc
	limit 1
) o
union all
(
	select h.lane, h.id, h.message_id
	from {{outbox_history}} h
	where h.id > (select p.id from possible p)
	order by h.id desc
	limit 10
)
limit 10;

-- name: last_id
-- The last id that was given out.
-- scans: outbox_id: a sequence has one row
select s.last_value - case when s.is_called then 0 else 1 end
from {{outbox_id}} s;

-- name: lock_writers
-- Writers hold row exclusive, which this lock excludes; readers continue.
lock table {{outbox}}, {{scheduled}} in share row exclusive mode;

-- name: repair_sequence
-- Follows lock_writers: the highest id must be looked up after the lock. By the same
-- indexes as check_sequence.
-- scans: outbox_id: a sequence has one row
with possible (id) as (
	select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48)
	from {{outbox_id}} s
)
select setval('{{outbox_id}}', greatest(
	(
		select greatest(
			(
				select coalesce(max(m.id), 0)
				from generate_series(0, 31) as l (lane)
				cross join lateral (
					select o.id
					from {{outbox}} o
					where o.lane = l.lane and o.id <= (select p.id from possible p)
					order by o.id desc
					limit 1
				) m
			),
			(select coalesce(max(h.id), 0) from {{outbox_history}} h where h.id <= (select p.id from possible p))
		)
	),
	(select last_value from {{outbox_id}}),
	$1
), true);

-- name: repair_scheduled
-- Follows lock_writers.
-- scans: scheduled: an operator waits for it, and no index is by seq alone
with possible_seq (seq) as (
	select least(coalesce(pg_sequence_last_value(pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass), 0), 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48)
)
select setval(q.seq, greatest(
	(select coalesce(max(s.seq), 1) from {{scheduled}} s where s.seq <= (select p.seq from possible_seq p)),
	pg_sequence_last_value(q.seq)
), true)
from (select pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass as seq) q;
