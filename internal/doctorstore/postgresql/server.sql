-- Everything here reads the server's catalogs and statistics, waits for no lock of a row, and
-- changes nothing.

-- name: server
-- A row of settings, and one entry for each standby. Subscribers of a logical slot are none.
select (extract(epoch from clock_timestamp()) * 1000000)::bigint,
	current_setting('synchronous_commit'),
	current_setting('default_transaction_isolation'),
	current_setting('autovacuum')::boolean,
	current_setting('track_counts')::boolean,
	current_setting('fsync')::boolean,
	current_setting('full_page_writes')::boolean,
	pg_is_in_recovery(),
	(select count(*) from pg_stat_replication r where r.state = 'streaming'
		and not exists (select from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')),
	current_setting('synchronous_standby_names') <> '';

-- name: forgetful_roles
-- By the index of pg_db_role_setting: roles whose transactions are lost in a crash. The server keeps
-- a value as it was written, and reads all of these as off or local. $1 is the most rows.
select coalesce(r.rolname::text, ''), s.setconfig[i],
	'alter role ' || coalesce(quote_ident(r.rolname), 'all') || coalesce(' in database ' || quote_ident(d.datname), '') || ' reset synchronous_commit'
from pg_db_role_setting s
cross join lateral generate_subscripts(s.setconfig, 1) i
left join pg_roles r on r.oid = s.setrole
left join pg_database d on d.oid = s.setdatabase
where s.setdatabase in (0, (select oid from pg_database where datname = current_database()))
	and lower(s.setconfig[i]) in ('synchronous_commit=off', 'synchronous_commit=local',
		'synchronous_commit=false', 'synchronous_commit=no', 'synchronous_commit=0')
order by 1, 2, 3
limit $1;

-- name: snapshots
-- What has kept deleted rows for longer than $1 microseconds, the oldest first. There are as many
-- sessions as the server allows. Sessions of other databases, and vacuum itself, keep none.
select kind, name, pid, age
from (
	select 'session' as kind, left(a.application_name, 64) as name, a.pid,
		(extract(epoch from clock_timestamp() - a.xact_start) * 1000000)::bigint as age
	from pg_stat_activity a
	where a.datname = current_database() and (a.backend_xmin is not null or a.backend_xid is not null) and a.xact_start is not null
		and not exists (select from pg_stat_progress_vacuum v where v.pid = a.pid)
	union all
	select 'prepared transaction', left(p.gid, 64), 0, (extract(epoch from clock_timestamp() - p.prepared) * 1000000)::bigint
	from pg_prepared_xacts p
	where p.database = current_database()
) held
where age > $1::bigint
order by age desc
limit $2;

-- name: idle_slots
-- Replication slots that nobody reads, and that keep deleted rows.
select s.slot_name::text
from pg_replication_slots s
where not s.active and (s.xmin is not null or s.catalog_xmin is not null)
order by 1
limit $1;

-- name: cached_sequences
-- By primary key.
select s.seqrelid::regclass::text, s.seqcache
from pg_sequence s
where s.seqrelid in (to_regclass('{{outbox_id}}'), to_regclass('{{dead_letters_id}}'), to_regclass('{{scheduled_seq_seq}}'))
	and s.seqcache > 1
order by 1;

-- name: without_autovacuum
-- By primary key. The server reads an option as it reads a boolean.
select c.oid::regclass::text
from pg_class c
where c.oid in (
		to_regclass('{{outbox_0}}'), to_regclass('{{outbox_1}}'), to_regclass('{{outbox_2}}'), to_regclass('{{outbox_3}}'),
		to_regclass('{{scheduled}}'), to_regclass('{{parked}}'), to_regclass('{{relay_leases}}'), to_regclass('{{relay_workers}}'),
		to_regclass('{{dead_letters}}'), to_regclass('{{inbox}}'), to_regclass('{{inbox_failures}}'), to_regclass('{{idempotency}}')
	)
	and exists (
		select from pg_options_to_table(c.reloptions) o
		where case o.option_name when 'autovacuum_enabled' then not o.option_value::boolean else false end
	)
order by 1;

-- name: subscribed
-- By the index of pg_subscription_rel on the table.
select r.srrelid::regclass::text
from pg_subscription_rel r
where r.srrelid in (
	to_regclass('{{outbox}}'), to_regclass('{{outbox_0}}'), to_regclass('{{outbox_1}}'), to_regclass('{{outbox_2}}'), to_regclass('{{outbox_3}}'),
	to_regclass('{{scheduled}}'), to_regclass('{{parked}}')
)
order by 1;

-- name: indexes
-- By the index of pg_class on the name.
select c.relname::text
from pg_class c
join pg_index i on i.indexrelid = c.oid
where c.relname::text = any ($1::text[]) and c.relnamespace = to_regnamespace('{{schema}}')
	and i.indisvalid and i.indisready;

-- name: hidden
-- By primary key. Tables of which this role may see some rows only.
select c.oid::regclass::text
from pg_class c
where c.oid in (to_regclass('{{dead_letters}}'), to_regclass('{{inbox}}'), to_regclass('{{idempotency}}'), to_regclass('{{outbox_history}}'))
	and row_security_active(c.oid)
order by 1;

-- name: mark
-- Marks the server's session, not the transaction.
select set_config('oncemill.doctor', $1, false);

-- name: marked
-- It has no plan to speak of.
select coalesce(current_setting('oncemill.doctor', true), '');
