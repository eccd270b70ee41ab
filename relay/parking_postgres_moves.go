package relay

// Every fenced write is one statement. Its fence takes FOR KEY SHARE on the row of the
// lease. A takeover, which locks FOR UPDATE, waits for a running write, and a write
// that waited for a takeover finds another owner. The owner's own renewal is not
// delayed. A move inserts what its deletion returned.
//
// A row that gets no time because another one is before it is written by a statement
// that has locked that other one FOR UPDATE, in "heads". The statement that deletes a
// first row looks for its successor later, with a newer snapshot, or, if fenced too,
// cannot run at the same time. It waits for locks, so a row that was deleted meanwhile
// is passed over for the next one. A statement that deletes another row leaves the
// search to the one that deletes the first, so that locks of a key are taken in the
// order of its rows. Conditions on columns that others change are tested on the locked
// rows, never on the snapshot.
//
// Rows are matched by lane, id, message id and creation time, by primary key.

const (
	kindFollower = 0
	kindRetry    = 1
	kindHold     = 2
)

const (
	postgresFence = `
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
)`

	postgresFenceAlone = postgresFence + `
select count(*) from f`

	// A suspect that is recorded as failed is cleared in the same statement. Otherwise
	// the next owner would charge it again.
	postgresFenceEnd = postgresCleared + `($4::bigint[])
)
select count(*) from f`

	postgresCleared = `, cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any `

	// The rows of a write, while the fence holds. The offset keeps the lane with them:
	// with poor statistics, the planner would consider a scan of the whole lane cheap.
	postgresRows = `(
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[])`
	postgresRowsAs  = `) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered`
	postgresRowsEnd = `)
		offset 0
	) c`

	postgresFailures = postgresRows + postgresRowsAs + postgresRowsEnd

	postgresFromOutbox = `
	where o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at,
		c.attempt, c.class, c.text, c.wait, c.fingerprint, c.unanswered, '[]'::jsonb as errors`

	postgresFromParked = `
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		and p.attempts = c.attempt - 1
		and not p.held`

	// From a row, or from what a deletion returned.
	postgresErrors = `case when jsonb_array_length(errors) < 10 then errors else errors - 0 end || jsonb_build_object(
		'at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text)`

	// The columns that a dead letter takes from a row, before its source.
	postgresLetter = `
	insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
		reason, error, attempts, fingerprint, maybe_delivered, errors, state, held)
	select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
		class, text, attempt, fingerprint, unanswered, `
)

const (
	// For the rows moved to parked, from "d": the head of each key, locked, and each
	// row's position among those of its key.
	postgresPlaced = `, heads as (
	select k.key, h.id, h.message_id, h.created_at
	from (select distinct key from d where key <> '') k
	cross join lateral (
		select p.id, p.message_id, p.created_at
		from {{parked}} p
		where p.lane = $1 and p.key = k.key
		order by p.id
		limit 1
		for update
	) h
), placed as (
	select d.*, h.id as head, row_number() over (partition by d.key order by d.id) as place
	from d
	left join heads h on h.key = d.key
)`

	// Outbox to parked: failures, the held ones with their dead letters, and followers.
	// A row that comes before the head of its key takes over from it.
	postgresPark = postgresFence + `, d as (
	delete from {{outbox}} o
	using ` + postgresRows + `, (select $13::smallint[])` + postgresRowsAs + `, kind` + postgresRowsEnd + postgresFromOutbox + `, c.kind
)` + postgresPlaced + `, moved as (
	insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, attempts, next_at, crashed, unanswered, held, errors)
	select lane, id, topic, message_id, key, payload, metadata, created_at, attempt,
		case when kind <> 2 and (key = '' or place = 1 and (head is null or id < head))
			then clock_timestamp() + wait * interval '1 microsecond'
		end,
		class = 'crashed', unanswered, kind = 2,
		case when kind = 0 then '[]'::jsonb else ` + postgresErrors + ` end
	from placed
	on conflict do nothing
), demoted as (
	update {{parked}} p
	set next_at = null
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and exists (select from placed n where n.key = h.key and n.id < h.id)
), letters as (` + postgresLetter + postgresErrors + `, 'held', true
	from d
	where kind = 2
)` + postgresCleared + `(
		select c.id from unnest($4::bigint[], $13::smallint[]) as c (id, kind) where c.kind <> 0
	)
)
select count(*) from f`

	// Outbox to parked, by key: a scan of the lane from its start, by its primary key,
	// to the first $5 rows of the keys $4, except the rows $6 and $7.
	postgresFollow = postgresFence + `, c as materialized (
	select o.lane, o.id, o.message_id, o.created_at
	from f
	cross join lateral (
		select o.lane, o.id, o.message_id, o.created_at
		from {{outbox}} o
		where o.lane = f.lane
			and o.key in (select unnest((select $4::text[])))
			and (o.id, o.created_at) not in (
				select k.id, timestamptz 'epoch' + k.created * interval '1 microsecond'
				from unnest((select $6::bigint[]), (select $7::bigint[])) as k (id, created)
			)
		order by o.id
		limit (select $5::bigint)
	) o
	limit $5
), d as (
	delete from {{outbox}} o
	using c
	where o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = c.created_at
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
)` + postgresPlaced + `, moved as (
	insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at,
		case when place = 1 and (head is null or id < head) then clock_timestamp() end
	from placed
	on conflict do nothing
), demoted as (
	update {{parked}} p
	set next_at = null
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and exists (select from placed n where n.key = h.key and n.id < h.id)
)
select (select count(*) from f), (select count(*) from d)`

	// Outbox to dead letters.
	postgresBury = postgresFence + `, d as (
	delete from {{outbox}} o
	using ` + postgresFailures + postgresFromOutbox + `
), letters as (` + postgresLetter + postgresErrors + `, 'dead', false
	from d
)` + postgresFenceEnd

	// One more attempt of a parked row. A row without a time is not a head and gets
	// none. Retry.TimeLimit counts from the first failure.
	postgresAgain = postgresFence + `, u as (
	update {{parked}} p
	set attempts = c.attempt,
		next_at = case when p.next_at is not null then clock_timestamp() + c.wait * interval '1 microsecond' end,
		crashed = p.crashed or c.class = 'crashed',
		unanswered = p.unanswered or c.unanswered,
		parked_at = case when c.attempt = 1 then clock_timestamp() else p.parked_at end,
		errors = ` + postgresErrors + `
	from ` + postgresFailures + postgresFromParked + `
)` + postgresFenceEnd

	// A parked row that has failed at no charge waits longer.
	postgresPostpone = postgresFence + `, u as (
	update {{parked}} p
	set next_at = case when p.next_at is not null then clock_timestamp() + c.wait * interval '1 microsecond' end,
		unanswered = p.unanswered or c.unanswered,
		errors = ` + postgresErrors + `
	from ` + postgresFailures + `
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		and p.attempts = c.attempt
		and not p.held
)` + postgresFenceEnd

	// Parked to dead letters; the next row is due now.
	postgresSkip = postgresFence + `, d as (
	delete from {{parked}} p
	using ` + postgresFailures + postgresFromParked + `
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at, p.errors,
		c.attempt, c.class, c.text, c.fingerprint, p.unanswered or c.unanswered as unanswered, p.next_at is not null as first
), letters as (` + postgresLetter + postgresErrors + `, 'dead', false
	from d
)` + postgresSuccessors + postgresFenceEnd

	// The first remaining rows of the keys of d, which the snapshot still holds, get a
	// time.
	postgresSuccessors = `, heads as (
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
)`

	// A parked row stays and is held; the dead letter holds its description.
	postgresHold = postgresFence + `, d as (
	update {{parked}} p
	set attempts = c.attempt, next_at = null, held = true, crashed = p.crashed or c.class = 'crashed',
		unanswered = p.unanswered or c.unanswered,
		errors = ` + postgresErrors + `
	from ` + postgresFailures + postgresFromParked + `
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at, p.errors,
		c.attempt, c.class, c.text, c.fingerprint, p.unanswered
), letters as (` + postgresLetter + `errors, 'held', true
	from d
)` + postgresFenceEnd
)

const (
	// A settlement of a held row locks the row and then its dead letter. So does this.
	//
	// Dead letters are found by primary key. A condition that matches a partial index
	// is hidden from the planner, which would read the whole index for a row or two as
	// long as the table was never analyzed.
	postgresHeldRows = `, locked as (
	select p.id
	from {{dead_letters}} d
	join {{parked}} p on p.lane = d.lane and p.id = d.row_id and p.message_id = d.message_id and p.created_at = d.created_at
	join f on f.lane = d.lane
	where d.id = any ($4::bigint[]) and d.source = 'relay' and d.held
	order by p.id
	for update of p
)`

	// The state of a dead letter changes once, and the row that its update returns goes
	// back to parked, or is there, held, and is released. It is due if it is the first
	// of its key, and takes over from the row that was.
	postgresReplay = postgresFence + postgresHeldRows + `, r as (
	update {{dead_letters}} d
	set state = 'replayed', version = d.version + 1, closed_at = clock_timestamp()
	from f
	where d.id = any ($4::bigint[]) and d.source = 'relay' and d.lane = f.lane and d.state || '' = 'replaying'
		and (select count(*) from locked) >= 0
	returning d.lane, d.row_id as id, d.topic, d.message_id, d.key, d.payload, d.metadata, d.created_at
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
), placed as (
	select r.*, row_number() over (partition by r.key order by r.id) as place, h.id as head,
		(r.id, r.message_id, r.created_at) = (h.id, h.message_id, h.created_at) as itself
	from r
	left join heads h on h.key = r.key
), moved as (
	insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at,
		case when key = '' or place = 1 and (head is null or id < head or itself) then clock_timestamp() end
	from placed
	on conflict (lane, id, message_id, created_at) do update
	set next_at = excluded.next_at, held = false, attempts = 0, crashed = false, errors = '[]', parked_at = excluded.parked_at
), demoted as (
	update {{parked}} p
	set next_at = null
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and exists (select from placed n where n.key = h.key and n.id < h.id)
		and (h.id, h.message_id, h.created_at) not in (select r.id, r.message_id, r.created_at from r)
)
select count(*) from f`

	postgresDiscard = postgresFence + postgresHeldRows + `, r as (
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
)` + postgresSuccessors + `
select count(*) from f`
)

const (
	// Deleting what the broker has confirmed is right whoever holds the lane.
	postgresSettled = `
with gone as (
	delete from {{parked}} p
	using ` + postgresConfirmed + `
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at,
		p.next_at is not null or p.held as first
)`

	postgresConfirmed = `unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) as c (lane, id, message_id, created_micros)`

	postgresSettle = postgresSettled + `
select lane, key, count(*), bool_or(first) from gone group by lane, key`

	postgresSettleMove = postgresSettled + `, kept as (
	insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
	from gone
)
select lane, key, count(*), bool_or(first) from gone group by lane, key`

	// By the partial index of open dead letters, a probe for each row, and by primary
	// key. A message that the broker has confirmed is no dead letter, even if somebody
	// gave it up meanwhile. The statement is separate, since the deletion may have
	// waited for that.
	postgresCloseLetters = `
update {{dead_letters}} d
set state = 'replayed', version = d.version + 1, closed_at = clock_timestamp(), acted_at = clock_timestamp(),
	acted_by = 'relay', acted_reason = 'confirmed by the broker after it was given up'
from (
	select m.id
	from ` + postgresConfirmed + `
	cross join lateral (
		select d.id
		from {{dead_letters}} d
		where d.source = 'relay' and d.closed_at is null
			and d.lane = c.lane
			and d.row_id = c.id
			and d.message_id = c.message_id
			and d.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		limit 10
	) m
) open
where d.id = open.id and coalesce(d.closed_at, 'infinity') = 'infinity'`

	// The first row of each key gets a time, once it is not locked any more. Keys
	// without rows are returned.
	postgresPromote = `
with heads as (
	select k.lane, k.key, h.id, h.message_id, h.created_at, h.next_at, h.held
	from unnest((select $1::smallint[]), (select $2::text[])) as k (lane, key)
	left join lateral (
		select p.id, p.message_id, p.created_at, p.next_at, p.held
		from {{parked}} p
		where p.lane = k.lane and p.key = k.key
		order by p.id
		limit 1
		for update
	) h on true
), promoted as (
	update {{parked}} p
	set next_at = clock_timestamp()
	from heads h
	where p.lane = h.lane and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and h.next_at is null and not h.held
)
select lane, key from heads where id is null`

	// The update waits for a takeover, and acts as its own fence.
	postgresSuspect = `
update {{relay_leases}}
set suspect = nullif($4::bigint, 0)
where lane = $1 and owner = $2 and epoch = $3`

	postgresCalm = `
update {{relay_leases}} l
set crashes = 0, suspect = null
from unnest($2::smallint[], $3::bigint[]) as c (lane, epoch)
where l.owner = $1 and l.lane = c.lane and l.epoch = c.epoch and l.crashes > 0`
)
