-- name: get
-- By primary key.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata, payload, errors,
	edited, edited_payload, edited_metadata, edited_at, edited_by, edited_reason
from {{dead_letters}}
where id = $1

-- name: now
-- The clock of the machine, in microseconds since 1970.
select cast(unixepoch('subsec') * 1000000 as integer)

-- name: states
-- By primary key.
select id, state
from {{dead_letters}}
where id in (select value from json_each($1))

-- name: replay_token
-- By primary key. The replay of the message itself has token, that of an edit edit_token.
select token || edit_token
from {{dead_letters}}
where id = $1
	and source = 'consumer'
	and state = 'replaying'
	and token || edit_token <> ''

-- name: check_replay
-- By primary key. The token stays when the replay ends, so a late copy is recognized.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata, payload, errors,
	edited, edited_payload, edited_metadata, edited_at, edited_by, edited_reason
from {{dead_letters}}
where id = $1
	and source = 'consumer'
	and token || edit_token = $2
	and token || edit_token <> ''

-- name: former_replay
-- By primary key.
select consumer, message_id, metadata
from {{dead_letters}}
where id = $1
	and source = 'consumer'
	and length($2) = 32
	and instr(former_tokens, $2) > 0

-- name: failed_again
-- index: dead_letters_message, in its order from the replay on. A letter of the same id that
-- no replay can have been is passed over.
select id
from {{dead_letters}}
where message_id = $1
	and died_at >= $2
	and id <> $3
	and source = $4
	and consumer = $5
	and (source = 'consumer' and reason not in ('conflict', 'unverified', 'malformed', 'older-than-retention')
		or source = 'consumer' and reason = 'conflict' and payload = (select case when l.edited then l.edited_payload else l.payload end from {{dead_letters}} l where l.id = $3)
		or source = 'relay' and lane = $6 and row_id = $7)
order by died_at, id
limit 1

-- name: notes
-- index: dead_letter_notes_letter, from its newest end.
select id, at, actor, text
from {{dead_letter_notes}}
where letter = $1
order by id desc
limit $2
