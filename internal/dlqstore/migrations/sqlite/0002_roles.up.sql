-- compatible: 1
-- maybe_delivered: an attempt before the one that failed for good was not answered,
-- so the broker may have the message all the same. SQLite has no roles, and an entry
-- of an index has no limit.
alter table {{dead_letters}} add column maybe_delivered integer not null default 0;
