-- name: highest_id
-- For each lane one probe of the index (lane, id) of parked and of the partial index
-- of open dead letters: those count while their messages can come back. An id that is
-- 2^48 or more ahead of the sequence was never given out (see the check in package
-- outbox), and does not count.
-- scans: outbox_id: it is a sequence
select coalesce(max(m.id), 0)
from generate_series(0, 31) as l (lane)
cross join (select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48) from {{outbox_id}} s) as b (bound)
cross join lateral (
	(select p.id from {{parked}} p where p.lane = l.lane and p.id <= b.bound order by p.id desc limit 1)
	union all
	(select d.row_id
		from {{dead_letters}} d
		where d.source = 'relay' and d.closed_at is null and d.lane = l.lane and d.row_id <= b.bound
		order by d.row_id desc
		limit 1)
) m (id);

-- name: dead_letters_behind
-- By primary key. The dead letters' own ids: inserts that reuse an id fail. An id that
-- is 2^48 or more ahead of the sequence was never given out (see the check in package
-- outbox), and does not count.
-- scans: dead_letters_id: it is a sequence
select s.last_value - case when s.is_called then 0 else 1 end < (
	select coalesce(max(d.id), 0)
	from {{dead_letters}} d
	where d.id <= (select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48) from {{dead_letters_id}} s)
)
from {{dead_letters_id}} s;

-- name: lock_dead_letters
-- Writers of dead letters hold row exclusive, which this lock excludes.
lock table {{dead_letters}} in share row exclusive mode;

-- name: repair_dead_letters
-- By primary key. Under the lock: the highest id is that after it.
-- scans: dead_letters_id: it is a sequence
select setval('{{dead_letters_id}}', greatest(
	(
		select coalesce(max(d.id), 0)
		from {{dead_letters}} d
		where d.id <= (select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48) from {{dead_letters_id}} s)
	),
	(select last_value from {{dead_letters_id}})
), true);
