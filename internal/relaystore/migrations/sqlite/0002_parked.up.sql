-- crashes counts takeovers since a window was last confirmed. suspect is the message that
-- the worker had in flight alone.
alter table {{relay_leases}} add column suspect integer;
alter table {{relay_leases}} add column crashes integer not null default 0;

-- Messages that could not be published, and their successors. The first row of
-- a key has the time of its next attempt unless it is held; its successors have
-- none. An unkeyed row always has its own. Times are microseconds since 1970.
create table {{parked}} (
	lane       integer not null check (lane between 0 and 31),
	id         integer not null,
	topic      text    not null,
	message_id text    not null,
	key        text    not null,
	payload    blob    not null,
	metadata   blob    not null,
	created_at integer not null,
	attempts   integer not null default 0,
	next_at    integer,
	crashed    integer not null default 0,
	held       integer not null default 0,
	parked_at  integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	errors     text    not null default '[]', -- of the last ten attempts
	primary key (lane, id, message_id, created_at),
	check (not held or next_at is null)
);

create index {{name:parked_due}} on {{parked}} (lane, topic, next_at) where next_at is not null;
create index {{name:parked_key}} on {{parked}} (lane, key, id);
create index {{name:parked_timed}} on {{parked}} (lane, key) where next_at is not null;
