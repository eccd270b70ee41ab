-- A row is a claimed key: started (1), completed (2), not replayable (3) or expired (4).
-- A key that may run again has no row. Only the hash of key and scope is stored.
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

-- A caller's outstanding keys: the claims of state 1. The predicate differs from that of
-- the statements that change them. Otherwise the planner would prefer this index, most of
-- whose entries are dead, to the primary key.
create index {{name:idempotency_outstanding}} on {{idempotency}} (caller) where completed_at is null;

-- Read by the purge, to delete.
create index {{name:idempotency_forget}} on {{idempotency}} (forget_at);

-- Read by the purge, to empty the records of expired keys that are still refused.
create index {{name:idempotency_expire}} on {{idempotency}} (expires_at)
where response is not null and forget_at > expires_at;

-- Large responses, so that the table above stays small.
create table {{idempotency_body}} (
	key_hash bytea not null primary key,
	response bytea not null
);
alter table {{idempotency_body}} alter column response set storage external;

-- The seal: a transaction that runs a handler begins by inserting a row that violates a
-- foreign key, which the database checks at the commit. Its last statement deletes the
-- row. A commit before that fails. No row needs to survive a crash.
create table {{idempotency_seal}} (
	id smallint primary key check (id is null)
);

create unlogged table {{idempotency_open}} (
	seal smallint not null
		constraint {{name:idempotency_ended_by_handler}} references {{idempotency_seal}} (id) deferrable initially deferred
);

-- A record as it is read. Remaining times are in microseconds from now.
create view {{idempotency_record}} as
select
	key_hash, caller, fingerprint, state, owner, fence, endpoint,
	coalesce(status, 0) as status,
	case when large then (select b.response from {{idempotency_body}} as b where b.key_hash = i.key_hash) else response end as response,
	coalesce(location, '') as location,
	coalesce(resource_id, '') as resource_id,
	coalesce(correlation_id, '') as correlation_id,
	coalesce(trace_id, '') as trace_id,
	(extract(epoch from lease_until - clock_timestamp()) * 1000000)::bigint as lease_left,
	(extract(epoch from expires_at - clock_timestamp()) * 1000000)::bigint as expires_in,
	(extract(epoch from created_at) * 1000000)::bigint as created_at,
	coalesce((extract(epoch from completed_at) * 1000000)::bigint, 0) as completed_at,
	forget_at > clock_timestamp() or state = 1 and lease_until > clock_timestamp() as alive
from {{idempotency}} as i;

-- The statements of each request are functions. A session plans the statements in them
-- once, also behind a pooler, and keeps the plan. So a plan made for the empty table must
-- be right for a full one, without a sequential scan. Times are set by
-- statement_timestamp, so that those that are meant to be equal are.

-- claim claims a key that has no record and returns the new record, or the existing one,
-- or nothing: claim again. An existing record is only read, without waiting.
--
-- The primary key decides between concurrent claims: the second one waits for this short
-- transaction, returns nothing, and is repeated. The same holds for a record that is due
-- for purging, which is deleted here. A claim that need not survive a crash of the server
-- does not wait for the disk. The commit of the effects, which is later in the log, makes
-- it durable, and without effects it is not needed.
create function {{idempotency_claim}}(
	key_hash bytea, caller bytea, fingerprint bytea, owner bytea, endpoint text,
	lease bigint, retention bigint, correlation_id text, trace_id text, durable boolean
) returns {{idempotency_record}}
language plpgsql set enable_seqscan = off
as $$
#variable_conflict use_column
declare
	made bigint;
	bulky boolean;
	r {{idempotency_record}};
begin
	if exists (select from {{idempotency}} where key_hash = $1) then
		select * into r from {{idempotency_record}} where key_hash = $1 and alive;
		if found then
			return r;
		end if;
	end if;
	if not durable then
		perform set_config('synchronous_commit', 'off', true);
	end if;
	insert into {{idempotency}} (
		key_hash, caller, fingerprint, state, owner, fence, endpoint,
		lease_until, expires_at, forget_at, correlation_id, trace_id
	)
	values (
		$1, $2, $3, 1, $4, 1, $5,
		statement_timestamp() + $6 * interval '1 microsecond',
		statement_timestamp() + $7 * interval '1 microsecond',
		statement_timestamp() + $7 * interval '1 microsecond',
		nullif($8, ''), nullif($9, '')
	)
	on conflict (key_hash) do nothing
	returning (extract(epoch from created_at) * 1000000)::bigint into made;
	if found then
		-- Not read back: under REPEATABLE READ a record deleted meanwhile could still
		-- be visible beside it.
		r := row($1, $2, $3, 1, $4, 1, $5, 0, null, '', '', $8, $9, $6, $7, made, 0, true);
		return r;
	end if;
	delete from {{idempotency}}
	where key_hash = $1 -- unless it has been claimed anew
		and forget_at <= clock_timestamp()
		and (state <> 1 or lease_until <= clock_timestamp())
	returning large into bulky;
	if bulky then
		delete from {{idempotency_body}} where key_hash = $1;
	end if;
	return r;
end
$$;

-- claim_group is claim for several keys, sorted and different, that need not be durable.
-- It returns the existing or new records with their positions, from 1. Keys without a
-- record must be claimed again. Existing records are read without a call of claim.
create function {{idempotency_claim_group}}(
	key_hash bytea[], caller bytea[], fingerprint bytea[], owner bytea[], endpoint text[],
	lease bigint[], retention bigint[], correlation_id text[], trace_id text[]
) returns table (place bigint, record {{idempotency_record}})
language plpgsql set enable_seqscan = off
as $$
#variable_conflict use_column
begin
	return query
	select asked.place, found.r
	from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9) with ordinality as asked (
		key_hash, caller, fingerprint, owner, endpoint, lease, retention, correlation_id, trace_id, place
	)
	cross join lateral (
		select r from {{idempotency_record}} as r where r.key_hash = asked.key_hash and r.alive
		union all
		select r from {{idempotency_claim}}(
			asked.key_hash, asked.caller, asked.fingerprint, asked.owner, asked.endpoint,
			asked.lease, asked.retention, asked.correlation_id, asked.trace_id, false
		) as r
		where r.alive
		limit 1
	) as found;
end
$$;

-- find returns the record of a key, or nothing. It never waits.
create function {{idempotency_find}}(key_hash bytea) returns {{idempotency_record}}
language plpgsql stable set enable_seqscan = off
as $$
#variable_conflict use_column
declare
	r {{idempotency_record}};
begin
	select * into r from {{idempotency_record}} where key_hash = $1 and alive;
	return r;
end
$$;

-- take_over gives a claim whose lease has ended to a new owner, and returns its record, or
-- nothing. Called again by the successor, it returns the record again. Of concurrent
-- callers one gets the row lock and the others get nothing. A row that its owner is just
-- completing is locked too, and left alone.
create function {{idempotency_take_over}}(
	key_hash bytea, owner bytea, fence bigint, successor bytea, lease bigint, retention bigint, durable boolean
) returns {{idempotency_record}}
language plpgsql set enable_seqscan = off
as $$
#variable_conflict use_column
declare
	r {{idempotency_record}};
begin
	if not durable then
		perform set_config('synchronous_commit', 'off', true);
	end if;
	update {{idempotency}}
	set owner = $4,
		fence = fence + 1,
		lease_until = statement_timestamp() + $5 * interval '1 microsecond',
		expires_at = statement_timestamp() + $6 * interval '1 microsecond',
		forget_at = statement_timestamp() + $6 * interval '1 microsecond'
	where key_hash = (
		select key_hash from {{idempotency}}
		where key_hash = $1
			and owner = $2
			and fence = $3
			and state = 1
			and lease_until <= clock_timestamp()
		for update skip locked
	);
	select * into r from {{idempotency_record}} where key_hash = $1 and state = 1 and owner = $4 and fence = $3 + 1;
	return r;
end
$$;

-- complete ends a claim, if the owner still has it. Above READ COMMITTED it raises 40001
-- for a claim that was taken over.
create function {{idempotency_complete}}(
	key_hash bytea, owner bytea, fence bigint, state integer, status integer, response bytea, large boolean,
	location text, resource_id text, retention bigint, forget bigint
) returns boolean
language plpgsql set enable_seqscan = off
as $$
#variable_conflict use_column
begin
	update {{idempotency}}
	set state = $4,
		status = nullif($5, 0),
		response = case when $7 then null else $6 end,
		large = $7,
		location = nullif($8, ''),
		resource_id = nullif($9, ''),
		completed_at = clock_timestamp(),
		expires_at = statement_timestamp() + $10 * interval '1 microsecond',
		forget_at = statement_timestamp() + $11 * interval '1 microsecond'
	where key_hash = $1
		and owner = $2
		and fence = $3
		and state = 1;
	if not found then
		return false;
	end if;
	if $7 then
		insert into {{idempotency_body}} (key_hash, response)
		values ($1, $6)
		on conflict (key_hash) do update set response = excluded.response;
	end if;
	return true;
end
$$;

-- begin seals the transaction. Its settings end with the transaction. With idle the server
-- ends a transaction whose process is paused, so that its locks do not block a takeover.
-- locks, unless empty, is the lock_timeout. The last setting is the ctid of the seal's row.
create function {{idempotency_begin}}(idle text, locks text) returns void
language plpgsql
as $$
declare
	place text;
begin
	perform set_config('idle_in_transaction_session_timeout', idle, true);
	if locks <> '' then
		perform set_config('lock_timeout', locks, true);
	end if;
	insert into {{idempotency_open}} (seal) values (0) returning ctid::text into place;
	perform set_config('oncemill.idempotency', place, true);
end
$$;

-- finish is the last statement of a sealed transaction. It completes the claim and permits
-- the commit. It returns false if the handler has ended the transaction, or if another
-- owner has the claim; then the seal stays.
create function {{idempotency_finish}}(
	key_hash bytea, owner bytea, fence bigint, state integer, status integer, response bytea, large boolean,
	location text, resource_id text, retention bigint, forget bigint
) returns boolean
language plpgsql set enable_seqscan = off
as $$
declare
	place tid := nullif(current_setting('oncemill.idempotency', true), '');
begin
	if not exists (select from {{idempotency_open}} where ctid = place) then
		return false;
	end if;
	if not {{idempotency_complete}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) then
		return false;
	end if;
	delete from {{idempotency_open}} where ctid = place;
	return true;
end
$$;

-- finish_group is finish for handlers that share a transaction. It returns the positions,
-- from 1, of the claims that belong to other owners, or of all if the transaction was
-- ended. It permits the commit only if there are none.
create function {{idempotency_finish_group}}(
	key_hash bytea[], owner bytea[], fence bigint[], state bigint[], status bigint[], response bytea[], large boolean[],
	location text[], resource_id text[], retention bigint[], forget bigint[]
) returns setof integer
language plpgsql set enable_seqscan = off
as $$
declare
	place tid := nullif(current_setting('oncemill.idempotency', true), '');
	stale boolean := false;
begin
	if not exists (select from {{idempotency_open}} where ctid = place) then
		return query select generate_subscripts($1, 1);
		return;
	end if;
	for i in 1 .. cardinality($1) loop
		if not {{idempotency_complete}}(
			$1[i], $2[i], $3[i], $4[i]::integer, $5[i]::integer, nullif($6[i], ''), $7[i], $8[i], $9[i], $10[i], $11[i]
		) then
			stale := true;
			return next i;
		end if;
	end loop;
	if not stale then
		delete from {{idempotency_open}} where ctid = place;
	end if;
end
$$;
