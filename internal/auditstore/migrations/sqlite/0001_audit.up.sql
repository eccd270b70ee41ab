-- What people did to messages and workers: who, when, why, what. Each entry is written in
-- the transaction of its act. Times are microseconds since 1970. SQLite has no roles.
create table {{audit}} (
	id      integer primary key autoincrement,
	at      integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	db_role text    not null default '',
	actor   text    not null check (actor <> ''),
	reason  text    not null default '',
	action  text    not null check (action <> ''),
	subject text    not null,
	details text    not null default ''
);

-- For lists, by the filter, and for the purge.
create index {{name:audit_at}} on {{audit}} (at, id);
create index {{name:audit_actor}} on {{audit}} (actor, at, id);
create index {{name:audit_action}} on {{audit}} (action, at, id);
create index {{name:audit_subject}} on {{audit}} (subject, at, id);
