-- Every statement here is fenced and locks heads: see the package comment.

-- name: replay
-- The state of a dead letter changes once, and the row that its update returns goes
-- back to parked, or is there, held, and is released. It is due if it is the first of
-- its key, and takes over from the row that was. Dead letters by primary key. The
-- condition on their state matches a partial index and is hidden from the planner,
-- which would read the whole index for a row or two as long as the table was never
-- analyzed. A removal of a held row locks the row and then its dead letter; so does
-- this. Fenced. Locks heads.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), locked as (
	select p.id
	from {{dead_letters}} d
	join {{parked}} p on p.lane = d.lane and p.id = d.row_id and p.message_id = d.message_id and p.created_at = d.created_at
	join f on f.lane = d.lane
	where d.id = any ($4::bigint[]) and d.source = 'relay' and d.held
	order by p.id
	for update of p
), r as (
	update {{dead_letters}} d
	set state = 'replayed', version = d.version + 1, closed_at = clock_timestamp()
	from f
	where d.id = any ($4::bigint[]) and d.source = 'relay' and d.lane = f.lane and d.state || '' = 'replaying'
		and (select count(*) from locked) >= 0
	returning d.lane, d.row_id as id, d.topic, d.message_id, d.key, d.payload, d.metadata, d.created_at, d.maybe_delivered
), heads as (
	select k.key, h.id, h.message_id, h.created_at
	from (select distinct key from r where key <> '') k
	cross join lateral (
		select p.id, p.message_id, p.created_at
		from {{parked}} p
		where p.lane = $1 and p.key = k.key
		order by p.id
		limit 1
		for update
	) h
), numbered as (
	select r.*, row_number() over (partition by r.key order by r.id) as nth, h.id as head,
		(r.id, r.message_id, r.created_at) = (h.id, h.message_id, h.created_at) as itself
	from r
	left join heads h on h.key = r.key
), moved as (
	insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, unanswered, next_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at, maybe_delivered,
		case when key = '' or nth = 1 and (head is null or id < head or itself) then clock_timestamp() end
	from numbered
	on conflict (lane, id, message_id, created_at) do update
	set next_at = excluded.next_at, held = false, attempts = 0, crashed = false, errors = '[]', parked_at = excluded.parked_at
), demoted as (
	update {{parked}} p
	set next_at = null
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and exists (select from numbered n where n.key = h.key and n.id < h.id)
		and (h.id, h.message_id, h.created_at) not in (select r.id, r.message_id, r.created_at from r)
)
select count(*) from f;

-- name: discard
-- A held row is deleted from parked, and its successor is due now. Dead letters by
-- primary key. The condition on their state matches a partial index and is hidden from
-- the planner, which would read the whole index for a row or two as long as the table
-- was never analyzed. A removal of a held row locks the row and then its dead letter;
-- so does this. Fenced.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), locked as (
	select p.id
	from {{dead_letters}} d
	join {{parked}} p on p.lane = d.lane and p.id = d.row_id and p.message_id = d.message_id and p.created_at = d.created_at
	join f on f.lane = d.lane
	where d.id = any ($4::bigint[]) and d.source = 'relay' and d.held
	order by p.id
	for update of p
), r as (
	update {{dead_letters}} d
	set state = 'discarded', version = d.version + 1, closed_at = clock_timestamp()
	from f
	where d.id = any ($4::bigint[]) and d.source = 'relay' and d.lane = f.lane and d.state || '' = 'discarding'
		and (select count(*) from locked) >= 0
	returning d.lane, d.row_id as id, d.message_id, d.key, d.created_at
), d as (
	delete from {{parked}} p
	using r
	where p.lane = r.lane and p.id = r.id and p.message_id = r.message_id and p.created_at = r.created_at and p.held
	returning p.id, p.message_id, p.key, p.created_at, true as first
), heads as (
	select h.*
	from (select distinct key from d where key <> '' and first) k
	cross join lateral (
		select p.id, p.message_id, p.created_at, p.next_at, p.held
		from {{parked}} p
		where p.lane = $1 and p.key = k.key
			and (p.id, p.message_id, p.created_at) not in (select d.id, d.message_id, d.created_at from d)
		order by p.id
		limit 1
		for update
	) h
), promoted as (
	update {{parked}} p
	set next_at = clock_timestamp()
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and h.next_at is null and not h.held
)
select count(*) from f;

-- name: retry_now
-- Retrying messages of a topic, or of all topics, by the partial index (lane, topic, next_at):
-- those that are not due, and have not failed since $6, in microseconds, are due. Rows that
-- somebody has locked are being dealt with. Fenced.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), chosen as (
	select p.lane, p.id, p.message_id, p.created_at
	from {{parked}} p
	join f on f.lane = p.lane
	where p.lane = $1
		and ($4::text = '' or p.topic = $4::text)
		and p.next_at > statement_timestamp()
		and coalesce((p.errors -> -1 ->> 'at')::bigint, 0) < $6::bigint
	limit $5
	for update of p skip locked
), hastened as (
	update {{parked}} p
	set next_at = statement_timestamp()
	from chosen c
	where p.lane = c.lane and p.id = c.id and p.message_id = c.message_id and p.created_at = c.created_at
	returning 1
)
select (select count(*) from f), (select count(*) from hastened);

-- name: retry_key_now
-- The first message of a key, by (lane, key, id), as retry_now. Fenced.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), chosen as (
	select p.lane, p.id, p.message_id, p.created_at
	from {{parked}} p
	join f on f.lane = p.lane
	where p.lane = $1
		and p.key = $7::text
		and ($4::text = '' or p.topic = $4::text)
		and p.next_at > statement_timestamp()
		and coalesce((p.errors -> -1 ->> 'at')::bigint, 0) < $6::bigint
	limit $5
	for update of p skip locked
), hastened as (
	update {{parked}} p
	set next_at = statement_timestamp()
	from chosen c
	where p.lane = c.lane and p.id = c.id and p.message_id = c.message_id and p.created_at = c.created_at
	returning 1
)
select (select count(*) from f), (select count(*) from hastened);
