-- name: next_due
-- The first entry of the index (deliver_at, seq).
select deliver_at - cast(unixepoch('subsec') * 1000000 as integer)
from {{scheduled}}
order by deliver_at, seq
limit 1;

-- name: choose_due
-- By the index (deliver_at, seq). SQLite has one writer at a time: a chosen row still
-- exists when it is moved.
select seq, length(payload) + length(metadata)
from {{scheduled}}
where deliver_at <= cast(unixepoch('subsec') * 1000000 as integer)
order by deliver_at, seq
limit ?1;

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
