-- name: waiting
-- By the partial indexes parked_due and parked_held, and by parked_key, from their starts: at most
-- $1 entries of each; and by the primary key, the first 32 rows of each lane, which are the oldest.
-- So ages are exact while the count is, and close to it beyond. Times are those of the messages.
select r.retrying,
	(select count(*) from (select from {{parked}} p where p.held order by p.lane limit $1) h),
	(select count(*) from (select from {{parked}} p order by p.lane, p.key, p.id limit $1) a),
	r.aside,
	coalesce((extract(epoch from clock_timestamp() - least(r.first, f.first)) * 1000000)::bigint, 0),
	coalesce((extract(epoch from clock_timestamp() - least(r.first_aside, f.first_aside)) * 1000000)::bigint, 0)
from (
	select count(*) as retrying, count(*) filter (where d.attempts = 0) as aside,
		min(d.created_at) as first, min(d.created_at) filter (where d.attempts = 0) as first_aside
	from (select p.created_at, p.attempts from {{parked}} p where p.next_at is not null order by p.lane, p.topic, p.next_at limit $1) d
) r
cross join (
	select min(o.created_at) as first, min(o.created_at) filter (where o.attempts = 0) as first_aside
	from generate_series(0, 31) as l (lane)
	cross join lateral (select p.created_at, p.attempts, p.next_at from {{parked}} p where p.lane = l.lane order by p.id limit 32) o
	where o.next_at is not null
) f;

-- name: retrying
-- By the partial index parked_due, from the start of each lane: at most $1 rows of a lane, then the
-- first $1 by their times. What waits behind each is counted by parked_key, up to 1000.
select p.lane, p.id, p.topic, p.message_id, p.key, p.attempts, p.crashed, p.unanswered, octet_length(p.payload),
	(extract(epoch from p.created_at) * 1000000)::bigint, (extract(epoch from p.parked_at) * 1000000)::bigint,
	(extract(epoch from p.next_at) * 1000000)::bigint, (extract(epoch from p.next_at - clock_timestamp()) * 1000000)::bigint, p.errors::text,
	(
		select count(*)
		from (select from {{parked}} b where p.key <> '' and b.lane = p.lane and b.key = p.key and b.id > p.id order by b.id limit 1000) b
	)
from generate_series(0, 31) as l (lane)
cross join lateral (
	select *
	from {{parked}} p
	where p.lane = l.lane and p.next_at is not null
	order by p.topic, p.next_at
	limit $1
) p
order by p.next_at, p.lane, p.id
limit $1;

-- name: retrying_topic
-- As retrying, by (lane, topic) of parked_due.
select p.lane, p.id, p.topic, p.message_id, p.key, p.attempts, p.crashed, p.unanswered, octet_length(p.payload),
	(extract(epoch from p.created_at) * 1000000)::bigint, (extract(epoch from p.parked_at) * 1000000)::bigint,
	(extract(epoch from p.next_at) * 1000000)::bigint, (extract(epoch from p.next_at - clock_timestamp()) * 1000000)::bigint, p.errors::text,
	(
		select count(*)
		from (select from {{parked}} b where p.key <> '' and b.lane = p.lane and b.key = p.key and b.id > p.id order by b.id limit 1000) b
	)
from generate_series(0, 31) as l (lane)
cross join lateral (
	select *
	from {{parked}} p
	where p.lane = l.lane and p.next_at is not null and p.topic = $2
	order by p.topic, p.next_at
	limit $1
) p
order by p.next_at, p.lane, p.id
limit $1;

-- name: retrying_key
-- By parked_heads or parked_key: a key has one row with a time. $2 is its lane.
select p.lane, p.id, p.topic, p.message_id, p.key, p.attempts, p.crashed, p.unanswered, octet_length(p.payload),
	(extract(epoch from p.created_at) * 1000000)::bigint, (extract(epoch from p.parked_at) * 1000000)::bigint,
	(extract(epoch from p.next_at) * 1000000)::bigint, (extract(epoch from p.next_at - clock_timestamp()) * 1000000)::bigint, p.errors::text,
	(
		select count(*)
		from (select from {{parked}} b where p.key <> '' and b.lane = p.lane and b.key = p.key and b.id > p.id order by b.id limit 1000) b
	)
from (
	select *
	from {{parked}} p
	where p.lane = $2 and p.key = $3 and p.next_at is not null
	order by p.id
	limit $1
) p
order by p.next_at, p.lane, p.id
limit $1;

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
	(extract(epoch from seen_until - clock_timestamp()) * 1000000)::bigint, ready, stopping, host, version, problem, coalesce((extract(epoch from clock_timestamp() - seen_at) * 1000000)::bigint, -1)
from {{relay_workers}}
where seen_until > clock_timestamp() - interval '1 hour'
order by name, started_at
limit 1000;
