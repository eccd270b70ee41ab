-- name: ring
-- One row for each partition. The size comes from the file system, without a lock. The
-- last number counts the index entries for which scans found no row: entries of dead rows
-- that a snapshot keeps. (Others are marked, and met once.)
-- scans: outbox_id: a sequence has one row
select
	(select last_value from {{outbox_id}}),
	pg_relation_size(p.partition),
	(
		select coalesce(sum(pg_stat_get_tuples_returned(i.indexrelid) - pg_stat_get_tuples_fetched(i.indexrelid)), 0)::bigint
		from pg_index i
		where i.indrelid = p.partition
	)
from unnest(array['{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass, '{{outbox_2}}'::regclass, '{{outbox_3}}'::regclass])
	with ordinality as p (partition, n)
order by p.n;

-- name: has_standby
-- Any role sees that a walsender exists; only some see its state. Walsenders that take a
-- backup or decode for logical replication replay nothing. A physical slot belongs to a
-- standby, which may be disconnected at the moment.
select exists (
	select
	from pg_stat_get_wal_senders() w
	where coalesce(w.state, '') <> 'backup'
		and not exists (select from pg_replication_slots s where s.active_pid = w.pid and s.slot_type = 'logical')
) or exists (
	select from pg_replication_slots s where s.slot_type = 'physical' and not s.temporary
);

-- name: advance_ids
-- Takes the remaining ids of the partition being written. nextval never goes back, so
-- writers need not be locked out. It does no harm if a writer or another upkeep takes
-- some of them meanwhile.
-- scans: outbox_id: a sequence has one row
select count(nextval('{{outbox_id}}'))
from generate_series(1, 65536 - ((select last_value from {{outbox_id}}) & 65535));

-- name: lockers_# for 0 to 3
-- The transactions that hold a lock on the partition. Any role sees these, unlike the age
-- of another role's transaction.
select distinct l.virtualtransaction
from pg_locks l
where l.granted
	and l.database = (select oid from pg_database where datname = current_database())
	and l.relation = '{{outbox_#}}'::regclass
	and l.pid is distinct from pg_backend_pid();

-- name: partition_empty_# for 0 to 3
-- Passes over all dead rows. An open writer holds a lock on the partition from its insert
-- to its end. So once SHARE ROW EXCLUSIVE is granted, which excludes writers and other
-- upkeep, every row is either committed, and visible to this test as a separate
-- statement, or gone. A test before the lock avoids locking partitions that are in use.
-- scans: outbox: it ends at the first row
select not exists (select from {{outbox_#}});

-- name: lock_partition_writers_# for 0 to 3
-- Excludes writers and other upkeep; readers continue.
lock table {{outbox_#}} in share row exclusive mode;

-- name: lock_partition_# for 0 to 3
-- Excludes readers too, once the partition is known to be empty.
lock table {{outbox_#}} in access exclusive mode;

-- name: truncate_partition_# for 0 to 3
-- Follows the test for emptiness behind lock_partition_writers.
truncate {{outbox_#}};

-- name: oldest_snapshots
-- System views, sorted by how far back they reach. A walsender shows its standby's oldest
-- snapshot here. A vacuum holds nothing back.
select kind, coalesce(pid, 0), coalesce(name, ''), coalesce(state, ''),
	coalesce((extract(epoch from clock_timestamp() - since) * 1000000)::bigint, 0)
from (
	select 'session' as kind, a.pid, a.application_name as name, a.state, a.xact_start as since,
		greatest(age(a.backend_xid), age(a.backend_xmin)) as reach
	from pg_stat_activity a
	where (a.backend_xid is not null or a.backend_xmin is not null)
		and a.pid <> pg_backend_pid()
		and a.backend_type <> 'autovacuum worker'
	union all
	select 'prepared transaction', null, x.gid, null, x.prepared, age(x.transaction)
	from pg_prepared_xacts x
	union all
	select 'replication slot', s.active_pid, s.slot_name, null, null, age(s.xmin)
	from pg_replication_slots s
	where s.xmin is not null
) h
order by reach desc, since
limit 1;

-- name: ring_lockers
-- System views: who holds locks on the ring, longest first.
select distinct on (since, l.pid)
	case when l.pid is null then 'prepared transaction' else 'session' end, coalesce(l.pid, 0),
	coalesce(a.application_name, x.gid, ''), coalesce(a.state, ''),
	coalesce((extract(epoch from clock_timestamp() - since) * 1000000)::bigint, 0)
from pg_locks l
left join pg_stat_activity a on a.pid = l.pid
left join pg_locks t on l.pid is null and t.locktype = 'transactionid' and t.virtualtransaction = l.virtualtransaction
left join pg_prepared_xacts x on x.transaction = t.transactionid
cross join lateral (select coalesce(a.xact_start, x.prepared)) s (since)
where l.granted
	and l.database = (select oid from pg_database where datname = current_database())
	and l.relation in ('{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass, '{{outbox_2}}'::regclass, '{{outbox_3}}'::regclass)
	and l.pid is distinct from pg_backend_pid()
order by since, l.pid;
