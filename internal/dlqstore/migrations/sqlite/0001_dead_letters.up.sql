-- Messages that a relay could not publish, or a consumer could not handle. A relay's
-- dead letter has the lane and the id of its row. While it is held, its message is
-- also in the relay's table parked. created_at is null if it is unknown. Times are
-- microseconds since 1970.
create table {{dead_letters}} (
	id           integer primary key autoincrement,
	state        text    not null default 'dead' check (state in ('dead', 'held', 'replaying', 'discarding', 'replayed', 'discarded')),
	version      integer not null default 1,
	source       text    not null check (source in ('relay', 'consumer')),
	consumer     text    not null default '',
	lane         integer check (lane between 0 and 31),
	row_id       integer,
	topic        text    not null,
	message_id   text    not null,
	key          text    not null default '',
	payload      blob    not null,
	metadata     blob    not null default x'',
	created_at   integer,
	died_at      integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	reason       text    not null,
	error        text    not null,
	stack        text    not null default '',
	attempts     integer not null default 1,
	errors       text    not null default '[]',
	trace_id     text    not null default '',
	fingerprint  text    not null,
	held         integer not null default 0,
	acted_at     integer,
	acted_by     text    not null default '',
	acted_reason text    not null default '',
	closed_at    integer,
	check ((source = 'relay') = (lane is not null and row_id is not null)),
	check (source = 'consumer' or created_at is not null),
	check (state <> 'held' or held),
	check ((closed_at is not null) = (state in ('replayed', 'discarded')))
);

-- For lists, by the filter.
create index {{name:dead_letters_died}} on {{dead_letters}} (died_at, id);
create index {{name:dead_letters_state}} on {{dead_letters}} (state, died_at, id);
create index {{name:dead_letters_topic}} on {{dead_letters}} (topic, died_at, id);
create index {{name:dead_letters_message}} on {{dead_letters}} (message_id, died_at, id);
create index {{name:dead_letters_key}} on {{dead_letters}} (key, died_at, id) where key <> '';
create index {{name:dead_letters_consumer}} on {{dead_letters}} (consumer, died_at, id) where consumer <> '';
create index {{name:dead_letters_fingerprint}} on {{dead_letters}} (fingerprint, died_at, id);

-- Read by relays: commands, and rows that may come back.
create index {{name:dead_letters_command}} on {{dead_letters}} (lane, row_id, id)
	where source = 'relay' and state in ('replaying', 'discarding');
create index {{name:dead_letters_open}} on {{dead_letters}} (lane, row_id)
	where source = 'relay' and closed_at is null;

-- Read by the purge.
create index {{name:dead_letters_closed}} on {{dead_letters}} (closed_at) where closed_at is not null;
