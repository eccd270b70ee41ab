-- How much the keys of a caller have taken in the current window: a row for each caller and
-- length of windows, which are in microseconds, as are times. It is counted by each process
-- about once a second for each caller that is active. What a crash loses of it does no harm.
create table {{idempotency_usage}} (
	caller  bytea  not null,
	span    bigint not null,
	ends_at bigint not null,
	keys    bigint not null,
	bytes   bigint not null,
	primary key (caller, span)
) with (fillfactor = 50);

-- Read by the purge. ends_at changes only with the window, so that the other updates of a
-- row touch no index.
create index {{name:idempotency_usage_ends}} on {{idempotency_usage}} (ends_at);
