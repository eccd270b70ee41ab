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
	and token = $3
	and token <> ''
	and payload = $4

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
