-- SQLite has one writer at a time: a writing statement sees the latest state, and
-- nothing changes in between. Lanes are passed as JSON.

-- name: beat_worker
-- By primary key.
insert into {{relay_workers}} (owner, name, seen_until, ready, stopping, host, version, problem, seen_at)
values (?1, ?2, cast(unixepoch('subsec') * 1000000 as integer) + ?3, ?4, ?5, ?6, ?7, ?8, cast(unixepoch('subsec') * 1000000 as integer))
on conflict (owner) do update
set seen_until = excluded.seen_until, ready = excluded.ready, stopping = excluded.stopping, problem = excluded.problem, seen_at = excluded.seen_at;

-- name: beat_leases
-- By primary key. Owner and epoch stay, so extending an expired lease is right as long
-- as nobody took it.
-- scans: relay_leases: it has 33 rows
update {{relay_leases}}
set lease_until = cast(unixepoch('subsec') * 1000000 as integer) + ?3
where owner = ?1 and lane in (select value from json_each(?2));

-- name: held
-- All lanes of a worker.
-- scans: relay_leases: it has 33 rows
select lane, epoch, lane in (select value from json_each(?2)) from {{relay_leases}} where owner = ?1;

-- name: census
-- A worker is returned as lane -2.
-- scans: relay_leases: it has 33 rows
-- scans: relay_workers: it has a row for each worker
select lane, owner, epoch, lease_until - cast(unixepoch('subsec') * 1000000 as integer), lease_until, 0, 0
from {{relay_leases}}
union all
select -2, owner, 0, 0, seen_until, ready, stopping
from {{relay_workers}}
where seen_until > cast(unixepoch('subsec') * 1000000 as integer);

-- name: take
-- Absent owners are counted before the first row changes. An owner that outlives its
-- lease has not died of a message: it could not finish one in time, which is an
-- outage. If two or more other owners have let leases expire, that was an outage of
-- the database. A lane with two crashes had something in flight only if it names that
-- in suspect. What was created before a lease expired that nobody gave back may have been
-- sent; a minute more is for a clock that is set back.
-- scans: relay_leases: it has 33 rows
with absent (owners) as materialized (
	select count(distinct owner)
	from {{relay_leases}}
	where owner not in ('', ?1) and lease_until < cast(unixepoch('subsec') * 1000000 as integer)
), alive (lane) as materialized (
	select l.lane
	from {{relay_leases}} l
	join {{relay_workers}} w on w.owner = l.owner
	where w.seen_until > l.lease_until + ?4 / 30
)
update {{relay_leases}}
set owner = ?1, epoch = epoch + 1, lease_until = cast(unixepoch('subsec') * 1000000 as integer) + ?4,
	crashes = crashes + (
		owner not in ('', ?1) and lane not in (select lane from alive) and (select owners from absent) < 2 and (
			suspect is not null
			or crashes < 2 and (
				exists (select 1 from {{outbox}} o where o.lane = {{name:relay_leases}}.lane)
				or exists (select 1 from {{parked}} p where p.lane = {{name:relay_leases}}.lane and p.next_at <= cast(unixepoch('subsec') * 1000000 as integer))
			)
		)
	),
	suspect = iif(lane in (select lane from alive), null, suspect),
	unsure_until = iif(owner <> '', max(coalesce(unsure_until, 0), lease_until + 60000000), unsure_until)
where lane in (
	select lane
	from {{relay_leases}}
	where lane in (select value from json_each(?2)) and lease_until < cast(unixepoch('subsec') * 1000000 as integer)
	limit ?3
)
returning lane, epoch, crashes, coalesce(suspect, 0), coalesce(unsure_until, 0);

-- name: expire
-- By primary key. Ends a lease that is still as it was seen.
update {{relay_leases}}
set lease_until = cast(unixepoch('subsec') * 1000000 as integer) - 1,
	unsure_until = max(coalesce(unsure_until, 0), lease_until + 60000000)
where lane = ?1 and owner = ?2 and epoch = ?3 and lease_until = ?4;

-- name: expire_worker
-- By primary key. Ends a worker that is still as it was seen.
delete from {{relay_workers}} where owner = ?1 and seen_until = ?2;

-- name: expire_former
-- The leases of other workers of the same name.
-- scans: relay_leases: it has 33 rows
-- scans: relay_workers: it has a row for each worker
update {{relay_leases}}
set lease_until = cast(unixepoch('subsec') * 1000000 as integer) - 1,
	unsure_until = max(coalesce(unsure_until, 0), lease_until + 60000000)
where lease_until > cast(unixepoch('subsec') * 1000000 as integer) and owner in (select owner from {{relay_workers}} where name = ?2 and owner <> ?1);

-- name: delete_former
-- Other workers of the same name.
-- scans: relay_workers: it has a row for each worker
delete from {{relay_workers}} where name = ?2 and owner <> ?1;

-- name: release
-- By primary key. Only what is still the owner's, in the same epoch: the answer to an earlier
-- release may have been lost, and the lane taken again.
update {{relay_leases}}
set owner = '', suspect = null, lease_until = cast(unixepoch('subsec') * 1000000 as integer) - 1,
	unsure_until = iif(?4, max(coalesce(unsure_until, 0), cast(unixepoch('subsec') * 1000000 as integer) + 60000000), unsure_until)
where owner = ?1 and lane = ?2 and epoch = ?3;

-- name: release_all
-- scans: relay_leases: it has 33 rows
update {{relay_leases}}
set owner = '', suspect = null, lease_until = cast(unixepoch('subsec') * 1000000 as integer) - 1,
	unsure_until = iif(
		lane in (select value from json_each(?2)),
		unsure_until,
		max(coalesce(unsure_until, 0), cast(unixepoch('subsec') * 1000000 as integer) + 60000000)
	)
where owner = ?1;

-- name: leave
-- Also deletes workers that died an hour ago.
-- scans: relay_workers: it has a row for each worker
delete from {{relay_workers}} where owner = ?1 or seen_until < cast(unixepoch('subsec') * 1000000 as integer) - 3600000000;

-- name: guard
-- By primary key. A write that changes nothing: from here on the transaction is the
-- writer.
update {{relay_leases}} set epoch = epoch where lane = ?1 and owner = ?2 and epoch = ?3;

-- name: fence
-- By primary key. The transaction is the only writer, so nothing changes after this
-- read.
select count(*) from {{relay_leases}} where lane = ?1 and owner = ?2 and epoch = ?3;

-- name: set_alone
-- By primary key; the conditions on owner and epoch are the fence.
update {{relay_leases}}
set suspect = nullif(?4, 0)
where lane = ?1 and owner = ?2 and epoch = ?3;

-- name: clear_alone
-- By primary key. Of a message that is recorded as failed: the next owner would blame
-- it again.
update {{relay_leases}} set suspect = null where lane = ?1 and suspect = ?2;

-- name: clear_crashes
-- By primary key; the conditions on owner and epoch are the fence.
update {{relay_leases}} set crashes = 0, suspect = null where owner = ?1 and lane = ?2 and epoch = ?3;
