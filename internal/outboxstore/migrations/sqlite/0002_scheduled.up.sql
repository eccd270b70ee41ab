-- A row is a message that moves into the outbox when it is due, and takes its id there
-- then. Here it has a number from a separate sequence.
create table {{scheduled}} (
	seq        integer primary key autoincrement,
	deliver_at integer not null,
	lane       integer not null check (lane between 0 and 31),
	topic      text    not null,
	message_id text    not null,
	key        text    not null default '',
	payload    blob    not null,
	metadata   blob    not null default x''
);

create index {{name:scheduled_by_time}} on {{scheduled}} (deliver_at, seq);
create index {{name:scheduled_by_message}} on {{scheduled}} (message_id);
