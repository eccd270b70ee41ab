-- name: waiting
-- By the partial indexes parked_due and parked_heads, and by parked_key, from their starts: at most
-- ?1 entries of each.
select
	(select count(*) from (select 1 from {{parked}} p where p.next_at is not null order by p.lane, p.topic, p.next_at limit ?1)),
	(select count(*) from (select 1 from {{parked}} p where p.held and (p.next_at is not null or p.held) order by p.lane, p.key limit ?1)),
	(select count(*) from (select 1 from {{parked}} p order by p.lane, p.key, p.id limit ?1));

-- name: owners
-- How long the lease of a lane lasts, or has been over, up to an hour.
-- By its primary key.
select lane, owner, max(lease_until, cast(unixepoch('subsec') * 1000000 as integer) - 3600000000) - cast(unixepoch('subsec') * 1000000 as integer)
from {{relay_leases}}
where lane >= 0
order by lane;

-- name: workers
-- Those that were seen within the last hour.
-- scans: relay_workers: it has a row for each worker
select owner, name, cast(unixepoch('subsec') * 1000000 as integer) - started_at,
	seen_until - cast(unixepoch('subsec') * 1000000 as integer), ready, stopping
from {{relay_workers}}
where seen_until > cast(unixepoch('subsec') * 1000000 as integer) - 3600000000
order by name, started_at
limit 1000;
