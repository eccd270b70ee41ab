-- name: schema_exists
-- By the unique index of pg_namespace on nspname.
select exists (select from pg_namespace where nspname = $1)

-- name: create_schema
-- Fails if the schema exists, also if it was created a moment ago.
create schema {{schema}}

-- name: drop_schema
-- Only run if create_schema has succeeded.
drop schema {{schema}} cascade

-- name: create_tables
-- None has a unique constraint that could hide a second effect.
create table {{verify_accounts}} (
	id       integer primary key,
	messages bigint  not null default 0
);

create table {{verify_sent}} (
	entry      bigserial,
	message_id text not null,
	topic      text not null,
	key        text not null,
	attempt    text not null,
	sum        text not null
);

create table {{verify_effects}} (
	entry      bigserial,
	consumer   text not null,
	message_id text not null,
	attempt    text not null,
	sum        text not null
);

create table {{verify_answers}} (
	request text not null,
	attempt text not null
);

insert into {{verify_accounts}} (id) select generate_series(0, 19)

-- name: lock_account
-- By the primary key. The lock is kept until the commit, so the entries of an account's
-- messages have the order of the commits.
update {{verify_accounts}} set messages = messages + 1 where id = $1

-- name: add_sent
-- Runs in the transaction that publishes the message.
insert into {{verify_sent}} (message_id, topic, key, attempt, sum) values ($1, $2, $3, $4, $5)

-- name: add_effect
-- Runs in the transaction of a handler.
insert into {{verify_effects}} (consumer, message_id, attempt, sum) values ($1, $2, $3, $4)

-- name: add_answer
-- Runs in the transaction of a request.
insert into {{verify_answers}} (request, attempt) values ($1, $2)

-- name: counts
-- Scans tables that only this run uses.
select
	(select count(*) from {{outbox}}) + (select count(*) from {{parked}}),
	(select count(*) from {{verify_sent}}),
	(select count(*) from {{verify_effects}}),
	(select count(*) from {{dead_letters}})

-- name: sent
-- Scans the table after the run.
select entry, message_id, topic, key, attempt, sum from {{verify_sent}} order by entry

-- name: effects
-- Scans the table after the run.
select entry, consumer, message_id, attempt, sum from {{verify_effects}} order by entry

-- name: answers
-- Scans the table after the run.
select request, attempt from {{verify_answers}}

-- name: letters
-- Scans the table after the run.
select source, consumer, message_id, reason from {{dead_letters}} order by id

-- name: settings
-- Reads no table.
select name, setting || coalesce(unit, '')
from pg_settings
where name in (
	'server_version', 'synchronous_commit', 'fsync', 'full_page_writes', 'synchronous_standby_names',
	'default_transaction_isolation', 'lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout', 'max_connections'
)
order by name <> 'server_version', name

-- name: tls
-- Of this session; no row if the role may not see it.
select case when ssl then version || ' ' || cipher else 'none' end from pg_stat_ssl where pid = pg_backend_pid()

-- name: backend
-- Reads no table.
select pg_backend_pid()

-- name: end_backends
-- Backends that this process has opened, and that still work for it: a pid may have been
-- given to another session since.
select count(*) filter (where pg_terminate_backend(pid))
from pg_stat_activity
where application_name = $1
	and pid = any($2::bigint[])
	and pid <> pg_backend_pid()
