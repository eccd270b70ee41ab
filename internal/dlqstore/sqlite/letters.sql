-- name: get
-- By primary key.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata, payload, errors
from {{dead_letters}}
where id = $1

-- name: states
-- By primary key.
select id, state
from {{dead_letters}}
where id in (select value from json_each($1))

-- name: replay_token
-- By primary key.
select token
from {{dead_letters}}
where id = $1
	and source = 'consumer'
	and state = 'replaying'
	and token <> ''

-- name: check_replay
-- By primary key. The token stays when the replay ends, so a late copy is recognized.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata, payload, errors
from {{dead_letters}}
where id = $1
	and source = 'consumer'
	and token = $2
	and token <> ''
