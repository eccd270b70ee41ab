-- name: notify
-- Wakes the sessions that listen on the channel $1.
select pg_notify($1, '');
