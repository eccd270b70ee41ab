-- name: add
-- Waits for nobody. An unknown time is null.
insert into {{dead_letters}} (source, consumer, topic, message_id, key, payload, metadata,
	reason, error, stack, attempts, errors, trace_id, fingerprint, created_at)
values ('consumer', $1, $2, $3, $4, $5, $6,
	$7, $8, $9, $10, $11, $12, $13, timestamptz 'epoch' + $14::bigint * interval '1 microsecond')

-- name: replay
-- By primary key. A trigger increments version and creates the token. Of two concurrent
-- commands, the second waits for the row and checks its state again.
update {{dead_letters}}
set state = 'replaying',
	acted_at = clock_timestamp(),
	acted_by = $2,
	acted_reason = $3
where id = any ($1::bigint[])
	and state in ('dead', 'held')
returning id

-- name: discard
-- By primary key. Concurrent commands: see replay.
update {{dead_letters}}
set state = case state when 'held' then 'discarding' else 'discarded' end,
	closed_at = case state when 'held' then null else clock_timestamp() end,
	acted_at = clock_timestamp(),
	acted_by = $2,
	acted_reason = $3
where id = any ($1::bigint[])
	and (state in ('dead', 'held') or state = 'replaying' and source = 'consumer')
returning id

-- name: replay_edited
-- By primary key. Concurrent commands: see replay. A trigger creates the token.
update {{dead_letters}}
set state = 'replaying',
	edited = true,
	edited_payload = $4,
	edited_metadata = $5,
	edited_at = clock_timestamp(),
	edited_by = $2,
	edited_reason = $3,
	acted_at = clock_timestamp(),
	acted_by = $2,
	acted_reason = $3
where id = any ($1::bigint[])
	and state = 'dead'
	and source = 'consumer'
returning id

-- name: restore
-- By primary key. Concurrent commands: see replay. A relay that removes the message of a
-- held one changes the state in the same statement, so one of the two finds nothing.
update {{dead_letters}}
set state = case state when 'discarding' then 'held' else 'dead' end,
	closed_at = null,
	acted_at = clock_timestamp(),
	acted_by = $2,
	acted_reason = $3
where id = any ($1::bigint[])
	and (state = 'discarding' or state = 'discarded' and not held)
returning id

-- name: add_note
-- By primary key. The foreign key keeps a purge out.
insert into {{dead_letter_notes}} (letter, actor, text)
select id, $2, $3
from {{dead_letters}}
where id = any ($1::bigint[])
returning letter

-- name: import
-- index: dead_letters_message
-- The unique index on origin. Of two imports of one dead letter, the second finds it, by origin, once the first has ended.
-- A relay's is held, so that it cannot be restored: its lane and row are another outbox's.
insert into {{dead_letters}} (state, source, consumer, lane, row_id, topic, message_id, key, payload, metadata, created_at, died_at,
	reason, error, stack, attempts, errors, trace_id, fingerprint, maybe_delivered, acted_at, acted_by, acted_reason, closed_at, held, origin)
select $1::text, $2::text, $3::text, $4::smallint, $5::bigint, $6::text, $7::text, $8::text, $9::bytea, $10::bytea,
	timestamptz 'epoch' + $11::bigint * interval '1 microsecond', timestamptz 'epoch' + $12::bigint * interval '1 microsecond',
	$13::text, $14::text, $15::text, $16::integer, $17::jsonb, $18::text, $19::text, $20::boolean,
	timestamptz 'epoch' + $21::bigint * interval '1 microsecond', $22::text, $23::text,
	case when $1::text = 'dead' then null else clock_timestamp() end, $2::text = 'relay', $24::text
where not exists (
	select 1
	from {{dead_letters}} l
	where left(l.message_id, 255) = left($7::text, 255)
		and l.message_id = $7::text
		and l.died_at = timestamptz 'epoch' + $12::bigint * interval '1 microsecond'
		and l.source = $2::text
		and l.consumer = $3::text
		and l.topic = $6::text
		and l.payload = $9::bytea
)
on conflict (origin) where origin <> '' do nothing
returning id

-- name: end_replay
-- By primary key. Of two transactions that end a replay, the second waits for the first
-- and finds the replay ended.
update {{dead_letters}}
set state = 'replayed',
	closed_at = clock_timestamp()
where id = $1
	and source = 'consumer'
	and consumer = $2
	and state = 'replaying'
	and token || edit_token = $3
	and token || edit_token <> ''
	and case when edited then edited_payload else payload end = $4

-- name: purge
-- index: dead_letters_closed, which is partial, from its oldest end
-- Concurrent calls take different rows. statement_timestamp() can be used in an index
-- condition.
delete from {{dead_letters}}
where id = any (array(
	select id
	from {{dead_letters}}
	where closed_at < statement_timestamp() - $1::bigint * interval '1 microsecond'
	order by closed_at
	limit $2
	for update skip locked
))
