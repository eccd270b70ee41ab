-- name: newest_by_time, reversed oldest_by_time
-- index: dead_letters_died, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where ($2 = '[]' or state in (select value from json_each($2)))
	and ($3 = '' or source = $3)
	and ($4 = '' or consumer = $4)
	and ($5 = '' or topic = $5)
	and ($6 = '' or key = $6)
	and ($7 = '' or message_id = $7)
	and ($8 = '' or reason = $8)
	and ($9 = '' or fingerprint = $9)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_message, reversed oldest_by_message
-- index: dead_letters_message, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where message_id = $7
	and ($2 = '[]' or state in (select value from json_each($2)))
	and ($3 = '' or source = $3)
	and ($4 = '' or consumer = $4)
	and ($5 = '' or topic = $5)
	and ($6 = '' or key = $6)
	and ($8 = '' or reason = $8)
	and ($9 = '' or fingerprint = $9)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_key, reversed oldest_by_key
-- index: dead_letters_key, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where key = $6
	and key <> ''
	and ($2 = '[]' or state in (select value from json_each($2)))
	and ($3 = '' or source = $3)
	and ($4 = '' or consumer = $4)
	and ($5 = '' or topic = $5)
	and ($7 = '' or message_id = $7)
	and ($8 = '' or reason = $8)
	and ($9 = '' or fingerprint = $9)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_fingerprint, reversed oldest_by_fingerprint
-- index: dead_letters_fingerprint, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where fingerprint = $9
	and ($2 = '[]' or state in (select value from json_each($2)))
	and ($3 = '' or source = $3)
	and ($4 = '' or consumer = $4)
	and ($5 = '' or topic = $5)
	and ($6 = '' or key = $6)
	and ($7 = '' or message_id = $7)
	and ($8 = '' or reason = $8)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_consumer, reversed oldest_by_consumer
-- index: dead_letters_consumer, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where consumer = $4
	and consumer <> ''
	and ($2 = '[]' or state in (select value from json_each($2)))
	and ($3 = '' or source = $3)
	and ($5 = '' or topic = $5)
	and ($6 = '' or key = $6)
	and ($7 = '' or message_id = $7)
	and ($8 = '' or reason = $8)
	and ($9 = '' or fingerprint = $9)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_topic, reversed oldest_by_topic
-- index: dead_letters_topic, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where topic = $5
	and ($2 = '[]' or state in (select value from json_each($2)))
	and ($3 = '' or source = $3)
	and ($4 = '' or consumer = $4)
	and ($6 = '' or key = $6)
	and ($7 = '' or message_id = $7)
	and ($8 = '' or reason = $8)
	and ($9 = '' or fingerprint = $9)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_state, reversed oldest_by_state
-- index: dead_letters_state, in its order, for one state. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata
from {{dead_letters}}
where state = json_extract($2, '$[0]')
	and ($3 = '' or source = $3)
	and ($4 = '' or consumer = $4)
	and ($5 = '' or topic = $5)
	and ($6 = '' or key = $6)
	and ($7 = '' or message_id = $7)
	and ($8 = '' or reason = $8)
	and ($9 = '' or fingerprint = $9)
	and died_at >= $10
	and died_at < $11
	and (died_at, id) {{<}} ($12, $13)
order by died_at {{desc}}, id {{desc}}
limit $1
