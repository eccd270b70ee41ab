-- name: newest_by_time, reversed oldest_by_time
-- index: dead_letters_died, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where (cardinality($2::text[]) = 0 or state = any ($2::text[]))
	and ($3::text = '' or source = $3::text)
	and ($4::text = '' or consumer = $4::text)
	and ($5::text = '' or topic = $5::text)
	and ($6::text = '' or key = $6::text)
	and ($7::text = '' or message_id = $7::text)
	and ($8::text = '' or reason = $8::text)
	and ($9::text = '' or fingerprint = $9::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_message, reversed oldest_by_message
-- index: dead_letters_message, in its order. The index holds a prefix of long texts. The other
-- conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where left(message_id, 255) = left($7::text, 255)
	and message_id = $7::text
	and (cardinality($2::text[]) = 0 or state = any ($2::text[]))
	and ($3::text = '' or source = $3::text)
	and ($4::text = '' or consumer = $4::text)
	and ($5::text = '' or topic = $5::text)
	and ($6::text = '' or key = $6::text)
	and ($8::text = '' or reason = $8::text)
	and ($9::text = '' or fingerprint = $9::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_key, reversed oldest_by_key
-- index: dead_letters_key, in its order. The index holds a prefix of long texts. The other
-- conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where left(key, 255) = left($6::text, 255)
	and key = $6::text
	and key <> ''
	and (cardinality($2::text[]) = 0 or state = any ($2::text[]))
	and ($3::text = '' or source = $3::text)
	and ($4::text = '' or consumer = $4::text)
	and ($5::text = '' or topic = $5::text)
	and ($7::text = '' or message_id = $7::text)
	and ($8::text = '' or reason = $8::text)
	and ($9::text = '' or fingerprint = $9::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_fingerprint, reversed oldest_by_fingerprint
-- index: dead_letters_fingerprint, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where fingerprint = $9::text
	and (cardinality($2::text[]) = 0 or state = any ($2::text[]))
	and ($3::text = '' or source = $3::text)
	and ($4::text = '' or consumer = $4::text)
	and ($5::text = '' or topic = $5::text)
	and ($6::text = '' or key = $6::text)
	and ($7::text = '' or message_id = $7::text)
	and ($8::text = '' or reason = $8::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_consumer, reversed oldest_by_consumer
-- index: dead_letters_consumer, in its order. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where consumer = $4::text
	and consumer <> ''
	and (cardinality($2::text[]) = 0 or state = any ($2::text[]))
	and ($3::text = '' or source = $3::text)
	and ($5::text = '' or topic = $5::text)
	and ($6::text = '' or key = $6::text)
	and ($7::text = '' or message_id = $7::text)
	and ($8::text = '' or reason = $8::text)
	and ($9::text = '' or fingerprint = $9::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_topic, reversed oldest_by_topic
-- index: dead_letters_topic, in its order. The index holds a prefix of long texts. The other
-- conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where left(topic, 255) = left($5::text, 255)
	and topic = $5::text
	and (cardinality($2::text[]) = 0 or state = any ($2::text[]))
	and ($3::text = '' or source = $3::text)
	and ($4::text = '' or consumer = $4::text)
	and ($6::text = '' or key = $6::text)
	and ($7::text = '' or message_id = $7::text)
	and ($8::text = '' or reason = $8::text)
	and ($9::text = '' or fingerprint = $9::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_state, reversed oldest_by_state
-- index: dead_letters_state, in its order, for one state. The other conditions filter its rows.
select id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata
from {{dead_letters}}
where state = ($2::text[])[1]
	and ($3::text = '' or source = $3::text)
	and ($4::text = '' or consumer = $4::text)
	and ($5::text = '' or topic = $5::text)
	and ($6::text = '' or key = $6::text)
	and ($7::text = '' or message_id = $7::text)
	and ($8::text = '' or reason = $8::text)
	and ($9::text = '' or fingerprint = $9::text)
	and died_at >= timestamptz 'epoch' + $10::bigint * interval '1 microsecond'
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'
	and (died_at, id) {{<}} (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at {{desc}}, id {{desc}}
limit $1
