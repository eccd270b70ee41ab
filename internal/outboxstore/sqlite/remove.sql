-- name: keep
-- By the primary key. SQLite has one writer at a time, so this copy and the deletion of
-- the row are one move.
insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
select id, lane, topic, message_id, key, payload, metadata, created_at, cast(unixepoch('subsec') * 1000000 as integer)
from {{outbox}}
where id = ?1 and lane = ?2 and message_id = ?3 and created_at = ?4;

-- name: delete
-- By the primary key.
delete from {{outbox}}
where id = ?1 and lane = ?2 and message_id = ?3 and created_at = ?4;
