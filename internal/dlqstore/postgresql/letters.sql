-- name: get
-- By primary key.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata, payload, errors,
	edited, edited_payload, edited_metadata, (date_part('epoch', edited_at) * 1000000)::bigint, edited_by, edited_reason
from {{dead_letters}}
where id = $1

-- name: now
-- The server's time, in microseconds since 1970.
select (date_part('epoch', clock_timestamp()) * 1000000)::bigint

-- name: states
-- By primary key.
select id, state
from {{dead_letters}}
where id = any ($1::bigint[])

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
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata, payload, errors,
	edited, edited_payload, edited_metadata, (date_part('epoch', edited_at) * 1000000)::bigint, edited_by, edited_reason
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
	and length($2::text) = 32
	and strpos(former_tokens, $2::text) > 0

-- name: failed_again
-- index: dead_letters_message, in its order from the replay on. The index holds a prefix of
-- long texts. A letter of the same id that no replay can have been is passed over.
select id
from {{dead_letters}}
where left(message_id, 255) = left($1::text, 255)
	and message_id = $1::text
	and died_at >= timestamptz 'epoch' + $2::bigint * interval '1 microsecond'
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
select id, (date_part('epoch', at) * 1000000)::bigint, actor, text
from {{dead_letter_notes}}
where letter = $1
order by id desc
limit $2
