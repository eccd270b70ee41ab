-- name: get
-- By primary key.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata, payload, errors
from {{dead_letters}}
where id = $1

-- name: states
-- By primary key.
select id, state
from {{dead_letters}}
where id = any ($1::bigint[])

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
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata, payload, errors
from {{dead_letters}}
where id = $1
	and source = 'consumer'
	and token = $2
	and token <> ''
