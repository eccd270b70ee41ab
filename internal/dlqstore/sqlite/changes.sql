-- name: add
-- SQLite has one writer at a time: a writing statement sees the latest state, and nothing
-- changes it meanwhile. An unknown time is null.
insert into {{dead_letters}} (source, consumer, topic, message_id, key, payload, metadata,
	reason, error, stack, attempts, errors, trace_id, fingerprint, created_at)
values ('consumer', $1, $2, $3, $4, $5, $6,
	$7, $8, $9, $10, $11, $12, $13, $14)

-- name: replay
-- By primary key: the unary plus keeps SQLite from using dead_letters_state. A trigger
-- creates the token. One writer: see add.
update {{dead_letters}}
set state = 'replaying',
	version = version + 1,
	acted_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_by = $2,
	acted_reason = $3
where id in (select value from json_each($1))
	and +state in ('dead', 'held')
returning id

-- name: discard
-- By primary key, like replay. One writer: see add.
update {{dead_letters}}
set state = case state when 'held' then 'discarding' else 'discarded' end,
	closed_at = case state when 'held' then null else cast(unixepoch('subsec') * 1000000 as integer) end,
	version = version + 1,
	acted_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_by = $2,
	acted_reason = $3
where id in (select value from json_each($1))
	and (+state in ('dead', 'held') or +state = 'replaying' and source = 'consumer')
returning id

-- name: end_replay
-- By primary key. One writer: see add.
update {{dead_letters}}
set state = 'replayed',
	version = version + 1,
	closed_at = cast(unixepoch('subsec') * 1000000 as integer)
where id = $1
	and source = 'consumer'
	and consumer = $2
	and state = 'replaying'
	and token = $3
	and token <> ''
	and payload = $4

-- name: purge
-- index: dead_letters_closed, which is partial, from its oldest end
-- One writer: see add.
delete from {{dead_letters}}
where id in (
	select id
	from {{dead_letters}}
	where closed_at < cast(unixepoch('subsec') * 1000000 as integer) - $1
	order by closed_at
	limit $2
)
