-- What operators have paused: topics, sinks, lanes, keys and consumers. The rows outlive every
-- process. There are few: pause refuses more than 1,000. Times are microseconds since 1970.
create table {{pauses}} (
	kind   text    not null check (kind in ('topic', 'sink', 'lane', 'key', 'consumer')),
	name   text    not null check (name <> ''),
	actor  text    not null check (actor <> ''),
	reason text    not null default '',
	since  integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	primary key (kind, name)
);

-- What operators want the owners of lanes to do, one row for each lane, until it is done.
create table {{lane_commands}} (
	id       integer primary key autoincrement,
	action   text    not null check (action in ('release', 'retry')),
	lane     integer not null check (lane between 0 and 31),
	topic    text    not null default '',
	key      text    not null default '',
	worker   text    not null default '',
	asked_at integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	unique (lane, action, topic, key)
);
