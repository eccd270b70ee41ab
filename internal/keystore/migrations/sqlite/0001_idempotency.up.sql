-- Always empty: a row that refers to it cannot be committed.
create table {{idempotency_seal}} (
	id integer primary key check (id is null)
);

-- A row is a claimed key: started (1), completed (2), not replayable (3) or expired (4).
-- A key that may run again has no row. Only the hash of key and scope is stored. Times are
-- microseconds since 1970.
--
-- The seal: a transaction that runs a handler begins by setting a reference that violates
-- a foreign key, which the database checks at the commit. Its last statement removes the
-- reference. A commit before that fails.
create table {{idempotency}} (
	key_hash       blob    not null primary key,
	caller         blob    not null,
	fingerprint    blob    not null,
	state          integer not null check (state between 1 and 4),
	owner          blob    not null,
	fence          integer not null,
	endpoint       text    not null,
	created_at     integer not null,
	completed_at   integer,
	lease_until    integer not null,
	expires_at     integer not null,
	forget_at      integer not null,
	status         integer,
	response       blob,
	large          integer not null default 0,
	location       text,
	resource_id    text,
	correlation_id text,
	trace_id       text,
	seal           integer references {{idempotency_seal}} (id) deferrable initially deferred
);

-- A caller's outstanding keys.
create index {{name:idempotency_outstanding}} on {{idempotency}} (caller) where completed_at is null;

-- Read by the purge, to delete.
create index {{name:idempotency_forget}} on {{idempotency}} (forget_at);

-- Read by the purge, to empty the records of expired keys that are still refused.
create index {{name:idempotency_expire}} on {{idempotency}} (expires_at)
where response is not null and forget_at > expires_at;

-- Large responses, so that the table above stays small.
create table {{idempotency_body}} (
	key_hash blob not null primary key,
	response blob not null
);

create trigger {{name:idempotency_body_gone}} after delete on {{idempotency}} when old.large
begin
	delete from {{idempotency_body}} where key_hash = old.key_hash;
end;
