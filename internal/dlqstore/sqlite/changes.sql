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
	edited = 0,
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
	edited = 0,
	closed_at = case state when 'held' then null else cast(unixepoch('subsec') * 1000000 as integer) end,
	version = version + 1,
	acted_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_by = $2,
	acted_reason = $3
where id in (select value from json_each($1))
	and (+state in ('dead', 'held') or +state = 'replaying' and source = 'consumer')
returning id

-- name: replay_edited
-- By primary key, like replay. Concurrent commands: see replay. A trigger creates the token.
update {{dead_letters}}
set state = 'replaying',
	edited = 1,
	edited_payload = $4,
	edited_metadata = $5,
	edited_at = cast(unixepoch('subsec') * 1000000 as integer),
	edited_by = $2,
	edited_reason = $3,
	version = version + 1,
	acted_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_by = $2,
	acted_reason = $3
where id in (select value from json_each($1))
	and +state = 'dead'
	and source = 'consumer'
returning id

-- name: restore
-- By primary key, like replay. Concurrent commands: see replay. A relay that removes the
-- message of a held one changes the state in the same statement, so one of the two finds nothing.
update {{dead_letters}}
set edited = 0,
	state = case state when 'discarding' then 'held' else 'dead' end,
	closed_at = null,
	version = version + 1,
	acted_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_by = $2,
	acted_reason = $3
where id in (select value from json_each($1))
	and (+state = 'discarding' or +state = 'discarded' and not held)
returning id

-- name: add_note
-- By primary key. One writer: see add.
insert into {{dead_letter_notes}} (letter, actor, text)
select id, $2, $3
from {{dead_letters}}
where id in (select value from json_each($1))
returning letter

-- name: import
-- index: dead_letters_message
-- One writer: see add. Of two imports of one dead letter, the second finds it, by origin.
-- A relay's is held, so that it cannot be restored: its lane and row are another outbox's.
insert into {{dead_letters}} (state, source, consumer, lane, row_id, topic, message_id, key, payload, metadata, created_at, died_at,
	reason, error, stack, attempts, errors, trace_id, fingerprint, maybe_delivered, acted_at, acted_by, acted_reason, closed_at, held, origin)
select $1, $2, $3, $4, $5, $6, $7, $8, $9, $10,
	$11, $12,
	$13, $14, $15, $16, $17, $18, $19, $20,
	$21, $22, $23,
	case when $1 = 'dead' then null else cast(unixepoch('subsec') * 1000000 as integer) end, $2 = 'relay', $24
where not exists (
	select 1
	from {{dead_letters}} l
	where l.message_id = $7
		and l.died_at = $12
		and l.source = $2
		and l.consumer = $3
		and l.topic = $6
		and l.payload = $9
)
on conflict (origin) where origin <> '' do nothing
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
	and token || edit_token = $3
	and token || edit_token <> ''
	and case when edited then edited_payload else payload end = $4

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
