-- A row is a message that the broker has not confirmed. Times are microseconds
-- since 1970.
create table {{outbox}} (
	id         integer primary key autoincrement,
	lane       integer not null check (lane between 0 and 31),
	topic      text    not null,
	message_id text    not null,
	key        text    not null default '',
	payload    blob    not null,
	metadata   blob    not null default x'',
	created_at integer not null default (cast(unixepoch('subsec') * 1000000 as integer))
);

create index {{name:outbox_lane}} on {{outbox}} (lane, id);

-- Confirmed messages.
create table {{outbox_history}} (
	id         integer not null,
	lane       integer not null,
	topic      text    not null,
	message_id text    not null,
	key        text    not null,
	payload    blob    not null,
	metadata   blob    not null,
	created_at integer not null,
	relayed_at integer not null
);

create index {{name:outbox_history_by_id}} on {{outbox_history}} (id);
create index {{name:outbox_history_by_time}} on {{outbox_history}} (relayed_at);
