-- What people did to messages and workers: who, when, why, what. Each entry is written in
-- the transaction of its act. Only the owner can change or delete entries; see the grants
-- in docs/operations.md. db_role is the role that was logged in, which nobody can choose.
create table {{audit}} (
	id      bigint      generated always as identity primary key,
	at      timestamptz not null default clock_timestamp(),
	db_role text        not null default session_user,
	actor   text        not null check (actor <> '' and octet_length(actor) <= 5000),
	reason  text        not null default '' check (octet_length(reason) <= 5000),
	action  text        not null check (action <> '' and octet_length(action) <= 100),
	subject text        not null check (octet_length(subject) <= 5000),
	details text        not null default '' check (octet_length(details) <= 5000)
);

-- For lists, by the filter, and for the purge. An entry of an index has at most 2,704
-- bytes, and 255 characters have at most 1,020.
create index {{name:audit_at}} on {{audit}} (at, id);
create index {{name:audit_actor}} on {{audit}} (left(actor, 255), at, id);
create index {{name:audit_action}} on {{audit}} (action, at, id);
create index {{name:audit_subject}} on {{audit}} (left(subject, 255), at, id);
