-- Always empty: a row that refers to it cannot be committed.
create table {{inbox_seal}} (
	id integer primary key check (id is null)
);

-- A row is a message whose effects have committed with it. Times are microseconds
-- since 1970.
--
-- The seal: a row is inserted with a reference that violates a foreign key, which the
-- database checks at the commit. The last statement of the inbox removes the reference.
-- A commit before that fails.
create table {{inbox}} (
	consumer    text    not null,
	message_id  text    not null,
	received_at integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	seal        integer references {{inbox_seal}} (id) deferrable initially deferred,
	primary key (consumer, message_id)
) without rowid;
