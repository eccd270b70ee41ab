-- Everything here reads the server's catalogs and statistics, waits for no lock of a row, and
-- changes nothing.

-- name: server
-- A row of settings, and one entry for each standby.
select (extract(epoch from clock_timestamp()) * 1000000)::bigint,
	current_setting('synchronous_commit'),
	current_setting('default_transaction_isolation'),
	current_setting('autovacuum')::boolean,
	current_setting('track_counts')::boolean,
	current_setting('fsync')::boolean,
	current_setting('full_page_writes')::boolean,
	pg_is_in_recovery(),
	(select count(*) from pg_stat_replication where state = 'streaming'),
	current_setting('synchronous_standby_names') <> '';

-- name: forgetful_roles
-- By the index of pg_db_role_setting: roles whose transactions are lost in a crash.
select coalesce(r.rolname::text, ''), s.setconfig[i]
from pg_db_role_setting s
cross join lateral generate_subscripts(s.setconfig, 1) i
left join pg_roles r on r.oid = s.setrole
where s.setdatabase in (0, (select oid from pg_database where datname = current_database()))
	and s.setconfig[i] in ('synchronous_commit=off', 'synchronous_commit=local')
order by 1, 2
limit $1;

-- name: snapshots
-- What has kept deleted rows for longer than $1 microseconds, the oldest first. There are as many
-- sessions as the server allows.
select kind, name, pid, age
from (
	select 'session' as kind, left(a.application_name, 64) as name, a.pid,
		(extract(epoch from clock_timestamp() - a.xact_start) * 1000000)::bigint as age
	from pg_stat_activity a
	where (a.backend_xmin is not null or a.backend_xid is not null) and a.xact_start is not null
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
-- By primary key.
select c.oid::regclass::text
from pg_class c
where c.oid in (
		to_regclass('{{outbox_0}}'), to_regclass('{{outbox_1}}'), to_regclass('{{outbox_2}}'), to_regclass('{{outbox_3}}'),
		to_regclass('{{scheduled}}'), to_regclass('{{parked}}'), to_regclass('{{relay_leases}}'), to_regclass('{{relay_workers}}'),
		to_regclass('{{dead_letters}}'), to_regclass('{{inbox}}'), to_regclass('{{inbox_failures}}'), to_regclass('{{idempotency}}')
	)
	and c.reloptions && array['autovacuum_enabled=false', 'autovacuum_enabled=off', 'autovacuum_enabled=no', 'autovacuum_enabled=0']
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

-- name: mark
-- Marks the server's session, not the transaction.
select set_config('oncemill.doctor', $1, false);

-- name: marked
-- It has no plan to speak of.
select coalesce(current_setting('oncemill.doctor', true), '');
