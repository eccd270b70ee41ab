-- dead: the row stands for a dead letter, not for effects; a replay takes it.
-- fingerprint: of the message whose effects these are, if fingerprints are made.
alter table {{inbox}} add column dead integer not null default 0;
alter table {{inbox}} add column fingerprint blob;

create index {{name:inbox_received}} on {{inbox}} (consumer, received_at);

-- A row is a message that has failed, or may have crashed a process, and has not
-- been handled yet. starts are those that have not ended; alone are those of them
-- during which nothing else was handled in the process. Times are microseconds
-- since 1970.
create table {{inbox_failures}} (
	consumer   text    not null,
	message_id text    not null,
	failures   integer not null default 0,
	starts     integer not null default 0,
	alone      integer not null default 0,
	errors     text    not null default '[]', -- of the last ten, as JSON
	changed_at integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	primary key (consumer, message_id)
) without rowid;

create index {{name:inbox_failures_changed}} on {{inbox_failures}} (consumer, changed_at);

-- The highest sequence of each key whose effects have committed.
create table {{inbox_sequences}} (
	consumer text    not null,
	key      text    not null,
	seq      integer not null,
	primary key (consumer, key)
) without rowid;
