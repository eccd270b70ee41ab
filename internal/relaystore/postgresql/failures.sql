-- Every statement here is fenced, and clears the mark of a message alone in flight. Those
-- that put rows behind others lock heads. See the package comment.

-- name: retry
-- Outbox to parked: failures, those that hold their key with their dead letters, and
-- followers. Kind is 0 for a follower, 1 for a retry, 2 for a key that is held. By the
-- primary key (lane, id) of one partition, which the condition on id names. The offset
-- keeps the lane with the rows: with poor statistics, the planner would consider a
-- scan of the whole lane cheap. A row that comes before the head of its key takes over
-- from it. Inserts what the delete returned. Fenced. Locks heads. Clears the mark.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), d as (
	delete from {{outbox}} o
	using (
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[]), (select $13::smallint[])
		) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered, kind)
		offset 0
	) c
	where o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at,
		c.attempt, c.class, c.text, c.wait, c.fingerprint, c.unanswered, '[]'::jsonb as errors, c.kind
), heads as (
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
), numbered as (
	select d.*, h.id as head, row_number() over (partition by d.key order by d.id) as nth
	from d
	left join heads h on h.key = d.key
), moved as (
	insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, attempts, next_at, crashed, unanswered, held, errors)
	select lane, id, topic, message_id, key, payload, metadata, created_at, attempt,
		case when kind <> 2 and (key = '' or nth = 1 and (head is null or id < head))
			then clock_timestamp() + wait * interval '1 microsecond'
		end,
		class = 'crashed', unanswered, kind = 2,
		case when kind = 0 then '[]'::jsonb else
			case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
				|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text)
		end
	from numbered
	on conflict do nothing
), demoted as (
	update {{parked}} p
	set next_at = null
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and exists (select from numbered n where n.key = h.key and n.id < h.id)
), letters as (
	insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
		reason, error, attempts, fingerprint, maybe_delivered, errors, state, held)
	select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
		class, text, attempt, fingerprint, unanswered,
		case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
			|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text),
		'held', true
	from d
	where kind = 2
), cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any (
		select c.id from unnest($4::bigint[], $13::smallint[]) as c (id, kind) where c.kind <> 0
	)
)
select count(*) from f;

-- name: retry_again
-- One more failed attempt of a row of parked. By primary key. A row without a time is
-- not a head and gets none. Retry.TimeLimit counts from the first failure. Conditions
-- on columns that others change are tested on the locked row. Fenced. Clears the
-- mark.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), u as (
	update {{parked}} p
	set attempts = c.attempt,
		next_at = case when p.next_at is not null then clock_timestamp() + c.wait * interval '1 microsecond' end,
		crashed = p.crashed or c.class = 'crashed',
		unanswered = p.unanswered or c.unanswered,
		parked_at = case when c.attempt = 1 then clock_timestamp() else p.parked_at end,
		errors = case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
			|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text)
	from (
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[])
		) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered)
		offset 0
	) c
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		and p.attempts = c.attempt - 1
		and not p.held
), cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any ($4::bigint[])
)
select count(*) from f;

-- name: postpone
-- A row of parked that has failed without being charged waits longer. By primary key.
-- Fenced. Clears the mark.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), u as (
	update {{parked}} p
	set next_at = case when p.next_at is not null then clock_timestamp() + c.wait * interval '1 microsecond' end,
		unanswered = p.unanswered or c.unanswered,
		errors = case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
			|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text)
	from (
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[])
		) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered)
		offset 0
	) c
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		and p.attempts = c.attempt
		and not p.held
), cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any ($4::bigint[])
)
select count(*) from f;

-- name: dead_letter
-- Outbox to dead letters. By the primary key (lane, id) of one partition, which the
-- condition on id names. Inserts what the delete returned. Fenced. Clears the mark.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), d as (
	delete from {{outbox}} o
	using (
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[])
		) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered)
		offset 0
	) c
	where o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at,
		c.attempt, c.class, c.text, c.wait, c.fingerprint, c.unanswered, '[]'::jsonb as errors
), letters as (
	insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
		reason, error, attempts, fingerprint, maybe_delivered, errors, state, held)
	select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
		class, text, attempt, fingerprint, unanswered,
		case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
			|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text),
		'dead', false
	from d
), cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any ($4::bigint[])
)
select count(*) from f;

-- name: dead_letter_retrying
-- Parked to dead letters; the next row of the key is due now. By primary key. The
-- remaining first rows are found by (lane, key, id) without the deleted ones, which
-- the snapshot still holds, and locked, so a row that was deleted meanwhile is passed
-- over for the next one. Inserts what the delete returned. Fenced. Clears the mark.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), d as (
	delete from {{parked}} p
	using (
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[])
		) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered)
		offset 0
	) c
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		and p.attempts = c.attempt - 1
		and not p.held
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at, p.errors,
		c.attempt, c.class, c.text, c.fingerprint, p.unanswered or c.unanswered as unanswered, p.next_at is not null as first
), letters as (
	insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
		reason, error, attempts, fingerprint, maybe_delivered, errors, state, held)
	select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
		class, text, attempt, fingerprint, unanswered,
		case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
			|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text),
		'dead', false
	from d
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
), cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any ($4::bigint[])
)
select count(*) from f;

-- name: hold_key
-- A row of parked stays and is held; the dead letter holds its description. By primary
-- key. Fenced. Clears the mark.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), d as (
	update {{parked}} p
	set attempts = c.attempt, next_at = null, held = true, crashed = p.crashed or c.class = 'crashed',
		unanswered = p.unanswered or c.unanswered,
		errors = case when jsonb_array_length(errors) < 10 then errors else errors - 0 end
			|| jsonb_build_object('at', (date_part('epoch', clock_timestamp()) * 1000000)::bigint, 'class', class, 'text', text)
	from (
		select f.lane, c.*
		from f, unnest(
			(select $4::bigint[]), (select $5::text[]), (select $6::bigint[]), (select $7::integer[]),
			(select $8::text[]), (select $9::text[]), (select $10::bigint[]), (select $11::text[]), (select $12::boolean[])
		) as c (id, message_id, created_micros, attempt, class, text, wait, fingerprint, unanswered)
		offset 0
	) c
	where p.lane = c.lane
		and p.id = c.id
		and p.message_id = c.message_id
		and p.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		and p.attempts = c.attempt - 1
		and not p.held
	returning p.lane, p.id, p.topic, p.message_id, p.key, p.payload, p.metadata, p.created_at, p.errors,
		c.attempt, c.class, c.text, c.fingerprint, p.unanswered
), letters as (
	insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
		reason, error, attempts, fingerprint, maybe_delivered, errors, state, held)
	select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
		class, text, attempt, fingerprint, unanswered, errors,
		'held', true
	from d
), cleared as (
	update {{relay_leases}} l
	set suspect = null
	from f
	where l.lane = f.lane and l.suspect = any ($4::bigint[])
)
select count(*) from f;

-- name: follow
-- Outbox to parked, by key: a scan of the lane from its start, by its primary key, to
-- the first $5 rows of the keys $4, except the rows $6 and $7. A row that comes before
-- the head of its key takes over from it. Inserts what the delete returned. Fenced.
-- Locks heads.
with f as (
	select lane
	from {{relay_leases}}
	where lane = $1 and owner = $2 and epoch = $3
	for key share
), c as materialized (
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
), heads as (
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
), numbered as (
	select d.*, h.id as head, row_number() over (partition by d.key order by d.id) as nth
	from d
	left join heads h on h.key = d.key
), moved as (
	insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
	select lane, id, topic, message_id, key, payload, metadata, created_at,
		case when nth = 1 and (head is null or id < head) then clock_timestamp() end
	from numbered
	on conflict do nothing
), demoted as (
	update {{parked}} p
	set next_at = null
	from heads h
	where p.lane = $1 and p.id = h.id and p.message_id = h.message_id and p.created_at = h.created_at
		and exists (select from numbered n where n.key = h.key and n.id < h.id)
)
select (select count(*) from f), (select count(*) from d);
