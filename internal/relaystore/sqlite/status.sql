-- name: waiting
-- By the partial indexes parked_due and parked_held, and by parked_key, from their starts: at most
-- ?1 entries of each; and by the primary key, the first 32 rows of each lane, which are the oldest.
-- So ages are exact while the count is, and close to it beyond. Times are those of the messages.
with recursive l (lane) as (select 0 union all select lane + 1 from l where lane < 31), d as (
	select p.created_at, p.attempts from {{parked}} p where p.next_at is not null order by p.lane, p.topic, p.next_at limit ?1
), r as (
	select count(*) as retrying, count(*) filter (where d.attempts = 0) as aside,
		min(d.created_at) as first, min(d.created_at) filter (where d.attempts = 0) as first_aside
	from d
), f as (
	select
		min((select min(o.created_at) from (select p.created_at, p.next_at from {{parked}} p where p.lane = l.lane order by p.id limit 32) o where o.next_at is not null)) as first,
		min((select min(o.created_at) from (select p.created_at, p.next_at, p.attempts from {{parked}} p where p.lane = l.lane order by p.id limit 32) o where o.next_at is not null and o.attempts = 0)) as first_aside
	from l
)
select r.retrying,
	(select count(*) from (select 1 from {{parked}} p where p.held order by p.lane limit ?1)),
	(select count(*) from (select 1 from {{parked}} p order by p.lane, p.key, p.id limit ?1)),
	r.aside,
	coalesce(cast(unixepoch('subsec') * 1000000 as integer) - min(coalesce(r.first, f.first), coalesce(f.first, r.first)), 0),
	coalesce(cast(unixepoch('subsec') * 1000000 as integer) - min(coalesce(r.first_aside, f.first_aside), coalesce(f.first_aside, r.first_aside)), 0)
from r, f;

-- name: retrying
-- By the partial index parked_due, the first 10,000 entries; of them the first ?1 by their times. What
-- waits behind each is counted by parked_key, up to 1000.
select r.lane, r.id, r.topic, r.message_id, r.key, r.attempts, r.crashed, r.unanswered, r.size, r.created_at, r.parked_at, r.next_at,
	r.next_at - cast(unixepoch('subsec') * 1000000 as integer), r.errors,
	(
		select count(*)
		from (select 1 from {{parked}} b where r.key <> '' and b.lane = r.lane and b.key = r.key and b.id > r.id order by b.id limit 1000)
	)
from (
	select p.lane, p.id, p.topic, p.message_id, p.key, p.attempts, p.crashed, p.unanswered, octet_length(p.payload) as size, p.created_at, p.parked_at, p.next_at, p.errors
	from {{parked}} p
	where p.next_at is not null
	order by p.lane, p.topic, p.next_at
	limit 10000
) r
order by r.next_at, r.lane, r.id
limit ?1;

-- name: retrying_topic
-- As retrying, over the entries of the topic.
select r.lane, r.id, r.topic, r.message_id, r.key, r.attempts, r.crashed, r.unanswered, r.size, r.created_at, r.parked_at, r.next_at,
	r.next_at - cast(unixepoch('subsec') * 1000000 as integer), r.errors,
	(
		select count(*)
		from (select 1 from {{parked}} b where r.key <> '' and b.lane = r.lane and b.key = r.key and b.id > r.id order by b.id limit 1000)
	)
from (
	select p.lane, p.id, p.topic, p.message_id, p.key, p.attempts, p.crashed, p.unanswered, octet_length(p.payload) as size, p.created_at, p.parked_at, p.next_at, p.errors
	from {{parked}} p
	where p.topic = ?2 and p.next_at is not null
	order by p.lane, p.topic, p.next_at
	limit 10000
) r
order by r.next_at, r.lane, r.id
limit ?1;

-- name: retrying_key
-- By parked_timed: a key has one row with a time. ?2 is its lane.
select r.lane, r.id, r.topic, r.message_id, r.key, r.attempts, r.crashed, r.unanswered, r.size, r.created_at, r.parked_at, r.next_at,
	r.next_at - cast(unixepoch('subsec') * 1000000 as integer), r.errors,
	(
		select count(*)
		from (select 1 from {{parked}} b where r.key <> '' and b.lane = r.lane and b.key = r.key and b.id > r.id order by b.id limit 1000)
	)
from (
	select p.lane, p.id, p.topic, p.message_id, p.key, p.attempts, p.crashed, p.unanswered, octet_length(p.payload) as size, p.created_at, p.parked_at, p.next_at, p.errors
	from {{parked}} p
	where p.lane = ?2 and p.key = ?3 and p.next_at is not null
	limit ?1
) r
order by r.next_at, r.lane, r.id
limit ?1;

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
	seen_until - cast(unixepoch('subsec') * 1000000 as integer), ready, stopping, host, version, problem, coalesce(cast(unixepoch('subsec') * 1000000 as integer) - seen_at, -1)
from {{relay_workers}}
where seen_until > cast(unixepoch('subsec') * 1000000 as integer) - 3600000000
order by name, started_at
limit 1000;
