-- How much the keys of a caller have taken in the current window: a row for each caller and
-- length of windows, which are in microseconds, as are times. It is counted by each process
-- about once a second for each caller that is active.
create table {{idempotency_usage}} (
	caller  blob    not null,
	span    integer not null,
	ends_at integer not null,
	keys    integer not null,
	bytes   integer not null,
	primary key (caller, span)
) without rowid;

-- Read by the purge.
create index {{name:idempotency_usage_ends}} on {{idempotency_usage}} (ends_at);
