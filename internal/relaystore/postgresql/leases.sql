-- Each is one statement, so a process that stops in the middle holds no lock. Under a
-- REPEATABLE READ default, a statement that lost against another one fails with 40001
-- and is retried at the next heartbeat.

-- name: beat
-- By primary key. Owner and epoch stay, so extending an expired lease is right as long
-- as nobody took it. A lease that somebody has locked, maybe to take it over, is not
-- extended this time and does not delay the others. Also deletes workers that died an
-- hour ago.
-- scans: relay_leases: it has 33 rows
-- scans: relay_workers: it has a row for each worker
with alive as (
	insert into {{relay_workers}} (owner, name, seen_until, ready, stopping, host, version, problem, seen_at)
	values ($1, $2, clock_timestamp() + $4::bigint * interval '1 microsecond', $5, $6, $7, $8, $9, clock_timestamp())
	on conflict (owner) do update
	set seen_until = excluded.seen_until, ready = excluded.ready, stopping = excluded.stopping, problem = excluded.problem, seen_at = excluded.seen_at
), dead as (
	delete from {{relay_workers}}
	where owner in (
		select owner
		from {{relay_workers}}
		where owner <> $1 and seen_until < clock_timestamp() - interval '1 hour'
		for update skip locked
	)
), kept as (
	update {{relay_leases}}
	set lease_until = clock_timestamp() + $4::bigint * interval '1 microsecond'
	where lane in (
		select lane
		from {{relay_leases}}
		where owner = $1 and lane = any ($3::smallint[])
		for no key update skip locked
	)
	returning lane, epoch
)
select lane, epoch, true from kept
union all
select lane, epoch, false from {{relay_leases}} where owner = $1 and lane not in (select lane from kept);

-- name: census
-- A worker is returned as lane -2.
-- scans: relay_leases: it has 33 rows
-- scans: relay_workers: it has a row for each worker
select lane, owner, epoch, (extract(epoch from lease_until - clock_timestamp()) * 1000000)::bigint,
	(date_part('epoch', lease_until) * 1000000)::bigint, false, false
from {{relay_leases}}
union all
select -2, owner, 0, 0, (date_part('epoch', seen_until) * 1000000)::bigint, ready, stopping
from {{relay_workers}}
where seen_until > clock_timestamp();

-- name: take
-- For update conflicts with the for key share of a fenced write: a takeover waits for
-- a running write, and the next fenced write of the former owner sees the new epoch.
-- An owner that outlives its lease has not died of a message: it could not finish one
-- in time, which is an outage. If two or more other owners have let leases expire,
-- that was an outage of the database. A lane with two crashes had something in flight
-- only if it names that in suspect. What was created before a lease expired that nobody
-- gave back may have been sent; a minute more is for servers whose clocks differ.
-- Whether a lane has a message that may have crashed its worker is one probe of an
-- index of outbox, and one or two for each topic of parked, by its partial index
-- (lane, topic, next_at), from each topic to the next. The limits keep the planner
-- from hashing them, the orders from scanning a whole table for a lane without rows.
-- scans: relay_leases: it has 33 rows
update {{relay_leases}} l
set owner = $1, epoch = l.epoch + 1, lease_until = clock_timestamp() + $4::bigint * interval '1 microsecond',
	crashes = l.crashes + case
		when free.owner not in ('', $1) and not free.alive and absent.owners < 2 and coalesce(
			case when l.crashes >= 2 then l.suspect is not null end,
			nullif(l.suspect is not null, false),
			(select true from {{outbox}} o where o.lane = l.lane order by o.id limit 1),
			(
				with recursive t (topic) as (
					(select p.topic from {{parked}} p where p.lane = l.lane and p.next_at is not null order by p.topic limit 1)
					union all
					select (
						select p.topic
						from {{parked}} p
						where p.lane = l.lane and p.next_at is not null and p.topic > t.topic
						order by p.topic
						limit 1
					)
					from t
					where t.topic is not null
				)
				select true
				from t
				where (
					select p.next_at
					from {{parked}} p
					where p.lane = l.lane and p.topic = t.topic and p.next_at is not null
					order by p.next_at
					limit 1
				) <= clock_timestamp()
				limit 1
			),
			false) then 1
		else 0
	end,
	suspect = case when not free.alive then l.suspect end,
	unsure_until = case when free.owner <> '' then greatest(l.unsure_until, l.lease_until + interval '1 minute') else l.unsure_until end
from (
	select f.lane, f.owner, exists (
		select from {{relay_workers}} w
		where w.owner = f.owner and w.seen_until > f.lease_until + $4::bigint / 30 * interval '1 microsecond'
	) as alive
	from {{relay_leases}} f
	where f.lane = any ($2::smallint[]) and f.lease_until < clock_timestamp()
	limit $3
	for update of f skip locked
) free, (
	select count(distinct owner) as owners
	from {{relay_leases}}
	where owner not in ('', $1) and lease_until < clock_timestamp()
) absent
where l.lane = free.lane
returning l.lane, l.epoch, l.crashes, coalesce(l.suspect, 0), coalesce((date_part('epoch', l.unsure_until) * 1000000)::bigint, 0);

-- name: expire
-- By primary key. Ends leases and workers that are still as they were seen.
with gone as (
	delete from {{relay_workers}} w
	using unnest($5::text[], $6::bigint[]) as s (owner, until)
	where w.owner = s.owner and w.seen_until = timestamptz 'epoch' + s.until * interval '1 microsecond'
)
update {{relay_leases}} l
set lease_until = clock_timestamp() - interval '1 microsecond', unsure_until = greatest(l.unsure_until, l.lease_until + interval '1 minute')
from unnest($1::smallint[], $2::text[], $3::bigint[], $4::bigint[]) as s (lane, owner, epoch, until)
where l.lane = s.lane and l.owner = s.owner and l.epoch = s.epoch
	and l.lease_until = timestamptz 'epoch' + s.until * interval '1 microsecond';

-- name: expire_former
-- Other workers of the same name. What somebody has locked stays, and expires.
-- scans: relay_leases: it has 33 rows
-- scans: relay_workers: it has a row for each worker
with former as (
	select owner
	from {{relay_workers}}
	where name = $2 and owner <> $1
	for update skip locked
), gone as (
	delete from {{relay_workers}} where owner in (select owner from former)
)
update {{relay_leases}}
set lease_until = clock_timestamp() - interval '1 microsecond', unsure_until = greatest(unsure_until, lease_until + interval '1 minute')
where lane in (
	select lane
	from {{relay_leases}}
	where owner in (select owner from former) and lease_until > clock_timestamp()
	for no key update skip locked
);

-- name: release
-- By primary key. Only what is still the owner's, in the same epoch: the answer to an earlier
-- release may have been lost, and the lane taken again.
update {{relay_leases}} l
set owner = '', suspect = null, lease_until = clock_timestamp(),
	unsure_until = case when l.lane = any ($4::smallint[]) then greatest(l.unsure_until, clock_timestamp() + interval '1 minute') else l.unsure_until end
from unnest($2::smallint[], $3::bigint[]) as r (lane, epoch)
where l.owner = $1 and l.lane = r.lane and l.epoch = r.epoch;

-- name: release_all
-- scans: relay_leases: it has 33 rows
update {{relay_leases}}
set owner = '', suspect = null, lease_until = clock_timestamp(),
	unsure_until = case when lane = any ($2::smallint[]) then unsure_until else greatest(unsure_until, clock_timestamp() + interval '1 minute') end
where owner = $1;

-- name: leave
-- By primary key.
delete from {{relay_workers}} where owner = $1;

-- name: set_durable
-- For this transaction. A stronger setting, for example remote_apply, stays.
select set_config('synchronous_commit', 'on', true)
where current_setting('synchronous_commit') in ('off', 'local', 'remote_write');

-- name: commit_in_full
-- For this transaction. A statement timeout would end COMMIT's wait for a synchronous
-- standby, and COMMIT would still succeed.
set local statement_timeout = 0;

-- name: touch
-- By primary key. The WAL record of this change lies behind the commits of everything
-- that was visible before.
update {{relay_workers}} set seen_until = seen_until where owner = $1;

-- name: guard
-- By primary key. For key share as in a fenced write: a takeover waits for the end of
-- the transaction, while the owner's own heartbeat does not.
select count(*)
from (select from {{relay_leases}} where lane = $1 and owner = $2 and epoch = $3 for key share) held;

-- name: fence
-- By primary key. The fence of a write that has nothing to write.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
)
select count(*) from f;

-- name: set_alone
-- By primary key. The update waits for a takeover, and is its own fence. Each message that
-- goes alone waits for it, so it does not wait for the disk or a standby: if the server
-- dies too, the worker's death shows nothing about the message.
update {{relay_leases}}
set suspect = nullif($4::bigint, 0)
where lane = $1 and owner = $2 and epoch = $3 and (select set_config('synchronous_commit', 'off', true)) = 'off';

-- name: clear_crashes
-- By primary key; the conditions on owner and epoch are the fence.
update {{relay_leases}} l
set crashes = 0, suspect = null
from unnest($2::smallint[], $3::bigint[]) as c (lane, epoch)
where l.owner = $1 and l.lane = c.lane and l.epoch = c.epoch and (l.crashes > 0 or l.suspect is not null);
