-- name: waiting
-- By the partial indexes parked_due and parked_heads, and by parked_key, from their starts: at most
-- $1 entries of each.
select
	(select count(*) from (select from {{parked}} p where p.next_at is not null order by p.lane, p.topic, p.next_at limit $1) r),
	(select count(*) from (select from {{parked}} p where p.held and (p.next_at is not null or p.held) order by p.lane, p.key limit $1) h),
	(select count(*) from (select from {{parked}} p order by p.lane, p.key, p.id limit $1) a);

-- name: owners
-- How long the lease of a lane lasts, or has been over, up to an hour.
-- scans: relay_leases: it has 33 rows
select lane, owner, (extract(epoch from greatest(lease_until, clock_timestamp() - interval '1 hour') - clock_timestamp()) * 1000000)::bigint
from {{relay_leases}}
where lane >= 0
order by lane;

-- name: workers
-- Those that were seen within the last hour.
-- scans: relay_workers: it has a row for each worker
select owner, name, (extract(epoch from clock_timestamp() - started_at) * 1000000)::bigint,
	(extract(epoch from seen_until - clock_timestamp()) * 1000000)::bigint, ready, stopping
from {{relay_workers}}
where seen_until > clock_timestamp() - interval '1 hour'
order by name, started_at
limit 1000;
