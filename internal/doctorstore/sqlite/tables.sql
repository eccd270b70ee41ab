-- name: indexes
-- There are a few dozen.
select name from sqlite_schema where type = 'index' and name in (select value from json_each($1));

-- name: now
-- It reads no table.
select cast(unixepoch('subsec') * 1000000 as integer);

-- name: overdue_key
-- index: idempotency_forget
-- How long ago the first key should have been deleted.
select cast(unixepoch('subsec') * 1000000 as integer) - forget_at
from {{idempotency}}
order by forget_at
limit 1;

-- name: oldest_id
-- index: inbox_received
select cast(unixepoch('subsec') * 1000000 as integer) - received_at
from {{inbox}}
where consumer = $1 and dead = 0
order by received_at
limit 1;

-- name: oldest_history
-- index: outbox_history_by_time
select cast(unixepoch('subsec') * 1000000 as integer) - relayed_at
from {{outbox_history}}
order by relayed_at
limit 1;

-- name: oldest_closed
-- index: dead_letters_closed
select cast(unixepoch('subsec') * 1000000 as integer) - closed_at
from {{dead_letters}}
where closed_at is not null
order by closed_at
limit 1;
