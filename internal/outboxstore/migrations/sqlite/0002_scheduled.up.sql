-- A row is a message that is to become one of the outbox at its time. It has a
-- sequence of its own: its id in the outbox is taken when it moves there.
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
