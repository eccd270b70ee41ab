-- name: next_due
-- The first entry of the primary key behind $3 and $4, except those postponed, $1, and
-- those of keys that wait, $2.
select (extract(epoch from s.deliver_at - clock_timestamp()) * 1000000)::bigint, octet_length(s.payload) + octet_length(s.metadata)
from {{scheduled}} s
where (s.deliver_at, s.seq) > ((select $3::timestamptz), (select $4::bigint))
	and s.seq not in (select unnest((select $1::bigint[])))
	and s.key not in (select unnest((select $2::text[])))
order by s.deliver_at, s.seq
limit 1;

-- name: next_large
-- As next_due, for due messages with more bytes than $5. Entries before it in the index
-- wait for a cancellation.
select octet_length(s.payload) + octet_length(s.metadata)
from {{scheduled}} s
where s.deliver_at <= (select clock_timestamp())
	and (s.deliver_at, s.seq) > ((select $3::timestamptz), (select $4::bigint))
	and s.seq not in (select unnest((select $1::bigint[])))
	and s.key not in (select unnest((select $2::text[])))
	and octet_length(s.payload) + octet_length(s.metadata) > $5
order by s.deliver_at, s.seq
limit 1;

-- name: move_settings
-- Due rows come first in the index. The statistics of a table that fills and empties do
-- not show that, so the planner gets no other choice. Constraints are checked when a row
-- is moved, so that a refused row is identified.
set local enable_seqscan = off; set local enable_bitmapscan = off; set local jit = off; set local datestyle = 'ISO'; set constraints all immediate;

-- name: choose_due
-- By the primary key (deliver_at, seq), from $8 and $9 to $10 and $11. $1 is the number
-- of rows to look at, $12 to choose, $2 the byte budget, $3 keys that wait already, $4
-- and $5 the least and the most bytes of a row, $6 those postponed, $7 the only row to
-- move, if it is not 0.
--
-- Passed over are rows of another size, rows postponed, and rows that somebody is
-- canceling, which are locked. So are the later rows of their keys: the cancellation
-- may be rolled back. A row that is not locked once it was read cannot be canceled
-- before this commits. The choice is separate from the move, so that a row that fails is
-- identified. The last columns are the position of the last row that was looked at.
with free as materialized (
	select s.deliver_at, s.seq, s.key, octet_length(s.payload) + octet_length(s.metadata) as bytes
	from {{scheduled}} s
	where s.deliver_at <= (select clock_timestamp())
		and (s.deliver_at, s.seq) > ((select $8::timestamptz), (select $9::bigint))
		and (s.deliver_at, s.seq) <= ((select $10::timestamptz), (select $11::bigint))
		and s.key not in (select unnest((select $3::text[])))
		and octet_length(s.payload) + octet_length(s.metadata) between $4 and $5
		and s.seq not in (select unnest((select $6::bigint[])))
		and ((select $7::bigint) = 0 or s.seq = (select $7::bigint))
	order by s.deliver_at, s.seq
	limit $1
	for update skip locked
), last as materialized (
	select deliver_at, seq from free order by deliver_at desc, seq desc limit 1
), held as materialized (
	select distinct on (s.key) s.key, s.deliver_at, s.seq
	from {{scheduled}} s
	where (s.deliver_at, s.seq) <= ((select deliver_at from last), (select seq from last))
		and s.key <> ''
		and s.key not in (select unnest((select $3::text[])))
		and s.seq not in (select seq from free)
	order by s.key, s.deliver_at, s.seq
), chosen as (
	select deliver_at, seq, key
	from (
		select deliver_at, seq, key,
			sum(bytes) over (order by deliver_at, seq rows between unbounded preceding and 1 preceding) as bytes_before
		from free
		where not exists (
			select
			from held h
			where h.key = free.key and (h.deliver_at, h.seq) < (free.deliver_at, free.seq)
		)
	) f
	where coalesce(bytes_before, 0) < $2
	order by deliver_at, seq
	limit $12
)
select array(select deliver_at::text from chosen order by deliver_at, seq), array(select seq from chosen order by deliver_at, seq),
	array(select key from chosen order by deliver_at, seq), array(select key from free intersect select key from held),
	coalesce((select deliver_at::text from last), ''), coalesce((select seq from last), 0);

-- name: move_due
-- By the primary key (deliver_at, seq). Ids are taken after the sort.
with gone as (
	delete from {{scheduled}} s
	using unnest((select $1::timestamptz[]), (select $2::bigint[])) as c (deliver_at, seq)
	where s.deliver_at = c.deliver_at and s.seq = c.seq
	returning s.deliver_at, s.seq, s.lane, s.topic, s.message_id, s.key, s.payload, s.metadata
)
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
select lane, topic, message_id, key, payload, metadata
from gone
order by deliver_at, seq;

-- name: move_singly
-- A message that waits for others, in a trigger, must cost little when messages are moved
-- one by one.
set local lock_timeout = '50ms';

-- name: savepoint
-- Before each of the messages that are moved one by one.
savepoint one;

-- name: release
-- After a message that was moved.
release savepoint one;

-- name: roll_back
-- After a message that was refused.
rollback to savepoint one;
