-- Each reads one row from an end of an index, and changes nothing. Deleted rows in front of it
-- cost time; the caller has a limit for that.

-- name: overdue_key
-- index: idempotency_forget
-- How long ago the first key should have been deleted.
select (extract(epoch from clock_timestamp() - forget_at) * 1000000)::bigint
from {{idempotency}}
order by forget_at
limit 1;

-- name: oldest_id
-- index: inbox_received
select (extract(epoch from clock_timestamp() - received_at) * 1000000)::bigint
from {{inbox}}
where consumer = $1 and not dead
order by received_at
limit 1;

-- name: oldest_history
-- By the index on the id, of each partition.
select (extract(epoch from clock_timestamp() - relayed_at) * 1000000)::bigint
from {{outbox_history}}
order by id
limit 1;

-- name: oldest_closed
-- index: dead_letters_closed
select (extract(epoch from clock_timestamp() - closed_at) * 1000000)::bigint
from {{dead_letters}}
where closed_at is not null
order by closed_at
limit 1;
