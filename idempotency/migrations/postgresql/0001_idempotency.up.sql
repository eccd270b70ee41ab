-- A row is a key that was claimed: started (1), completed (2), not replayable (3)
-- or expired (4). A key that may run again has no row. Neither key nor scope is
-- stored, only their hash.
create table {{idempotency}} (
	key_hash       bytea       not null primary key,
	caller         bytea       not null,
	fingerprint    bytea       not null,
	state          smallint    not null check (state between 1 and 4),
	owner          bytea       not null,
	fence          bigint      not null,
	endpoint       text        not null,
	created_at     timestamptz not null default clock_timestamp(),
	completed_at   timestamptz,
	lease_until    timestamptz not null,
	expires_at     timestamptz not null,
	forget_at      timestamptz not null,
	status         integer,
	response       bytea,
	large          boolean     not null default false,
	location       text,
	resource_id    text,
	correlation_id text,
	trace_id       text
);

-- What a caller has outstanding.
create index {{name:idempotency_outstanding}} on {{idempotency}} (caller) where state = 1;

-- What the purge deletes.
create index {{name:idempotency_forget}} on {{idempotency}} (forget_at);

-- What the purge empties: answers that are refused for a while once they expired.
create index {{name:idempotency_expire}} on {{idempotency}} (expires_at)
where response is not null and forget_at > expires_at;

-- Large responses, so that the table above stays small.
create table {{idempotency_body}} (
	key_hash bytea not null primary key,
	response bytea not null
);
alter table {{idempotency_body}} alter column response set storage external;

-- The seal: a transaction that runs a handler has a row here, and the database
-- refuses to commit it unless the last statement said that it is complete. The
-- row goes with that statement. Nothing of it has to survive a crash.
create unlogged table {{idempotency_open}} (
	opened boolean not null
);

create function {{idempotency_seal}}() returns trigger
language plpgsql
as $$
begin
	if current_setting('oncemill.idempotency', true) is distinct from 'sealed ' || txid_current() then
		raise exception using
			errcode = 'OMD01',
			message = 'oncemill: a transaction of an idempotent request was ended by its handler',
			hint = 'Return from the handler instead. A handler that checks deferred constraints early must name them in set constraints.';
	end if;
	return null;
end
$$;

create constraint trigger {{name:idempotency_seal}}
after insert on {{idempotency_open}}
deferrable initially deferred
for each row execute function {{idempotency_seal}}();
