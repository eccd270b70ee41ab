-- dead: the row stands for a dead letter, not for effects; a replay takes it.
-- fingerprint: of the message whose effects these are, if fingerprints are made.
alter table {{inbox}}
	add column dead        boolean not null default false,
	add column fingerprint bytea;

create index {{name:inbox_received}} on {{inbox}} (consumer, received_at);

-- A row is a message that has failed, or may have crashed a process, and has not
-- been handled yet. starts are those that have not ended; alone are those of them
-- during which nothing else was handled in the process.
create table {{inbox_failures}} (
	consumer   text        collate "C" not null,
	message_id text        collate "C" not null,
	failures   integer     not null default 0,
	starts     integer     not null default 0,
	alone      integer     not null default 0,
	errors     text        not null default '[]', -- of the last ten, as JSON
	changed_at timestamptz not null default clock_timestamp(),
	primary key (consumer, message_id)
);

create index {{name:inbox_failures_changed}} on {{inbox_failures}} (consumer, changed_at);

-- The highest sequence of each key whose effects have committed.
create table {{inbox_sequences}} (
	consumer text   collate "C" not null,
	key      text   collate "C" not null,
	seq      bigint not null,
	primary key (consumer, key)
);
