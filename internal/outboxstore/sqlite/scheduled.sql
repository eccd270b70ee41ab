-- name: next_due
-- The first entry of the index (deliver_at, seq) behind ?3 and ?4, except those postponed,
-- ?1, and those of keys that wait, ?2.
select deliver_at - cast(unixepoch('subsec') * 1000000 as integer)
from {{scheduled}}
where (deliver_at, seq) > (?3, ?4)
	and seq not in (select value from json_each(?1))
	and key not in (select value from json_each(?2))
order by deliver_at, seq
limit 1;

-- name: choose_due
-- By the index (deliver_at, seq), from ?4 and ?5 to ?6 and ?7. ?1 is the number of rows, ?2
-- those postponed, ?3 keys that wait. SQLite has one writer at a time: a chosen row still exists
-- when it is moved. What is passed over up to ?4 and ?5 keeps the later rows of its keys.
select deliver_at, seq, key, length(payload) + length(metadata)
from {{scheduled}} s
where deliver_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and (deliver_at, seq) > (?4, ?5)
	and (deliver_at, seq) <= (?6, ?7)
	and seq not in (select value from json_each(?2))
	and key not in (select value from json_each(?3))
	and key not in (select e.key from {{scheduled}} e where (e.deliver_at, e.seq) <= (?4, ?5) and e.key <> '')
order by deliver_at, seq
limit ?1;

-- name: choose_one
-- By the primary key. The earlier rows, which keep those of their keys, by the index
-- (deliver_at, seq): what is tried alone was due long ago, so they are few.
select deliver_at, seq, key, length(payload) + length(metadata)
from {{scheduled}} s
where seq = ?1
	and deliver_at <= cast(unixepoch('subsec') * 1000000 as integer)
	and not exists (
		select 1
		from {{scheduled}} e
		where e.key = s.key
			and e.key <> ''
			and (e.deliver_at, e.seq) < (s.deliver_at, s.seq)
	);

-- name: copy_due
-- By the primary key. Ids are taken after the sort.
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
select lane, topic, message_id, key, payload, metadata
from {{scheduled}}
where seq in (select value from json_each(?1))
order by deliver_at, seq;

-- name: delete_due
-- By the primary key.
delete from {{scheduled}}
where seq in (select value from json_each(?1));

-- name: savepoint
-- Before what may be refused.
savepoint one;

-- name: release
-- After what was moved.
release savepoint one;

-- name: roll_back
-- After what was refused.
rollback to savepoint one;
