package dlq

import "github.com/lib/pq"

func arrayList[T any](list []T) any {
	if list == nil {
		list = []T{} // nil would be NULL
	}
	return pq.Array(list)
}

const (
	postgresColumns = `id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	octet_length(payload),
	case when created_at > '0001-01-01 00:00:00+00' and created_at < '10000-01-01 00:00:00+00' then (date_part('epoch', created_at) * 1000000)::bigint end,
	(date_part('epoch', died_at) * 1000000)::bigint,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, (date_part('epoch', acted_at) * 1000000)::bigint, (date_part('epoch', closed_at) * 1000000)::bigint,
	metadata`

	// By primary key.
	postgresGet = `select ` + postgresColumns + `, payload, errors from {{dead_letters}} where id = $1`

	postgresStates = `select id, state from {{dead_letters}} where id = any ($1::bigint[])`

	// By the index on what a driver adds, or on (died_at, id), in its order. The other
	// conditions filter the rows of that index.
	postgresList = `
select ` + postgresColumns + `
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
	and died_at < timestamptz 'epoch' + $11::bigint * interval '1 microsecond'`

	postgresOneState = ` and state = ($2::text[])[1]`

	postgresNewest = `
	and (died_at, id) < (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at desc, id desc
limit $1`

	postgresOldest = `
	and (died_at, id) > (timestamptz 'epoch' + $12::bigint * interval '1 microsecond', $13::bigint)
order by died_at, id
limit $1`

	// A trigger increments version. The condition on the state accepts one command
	// only: of two concurrent ones, the second waits for the row and checks it again.
	postgresReplay = `
update {{dead_letters}}
set state = 'replaying', acted_at = clock_timestamp(), acted_by = $2, acted_reason = $3
where id = any ($1::bigint[]) and state in ('dead', 'held')
returning id`

	postgresReplayed = `
update {{dead_letters}}
set state = 'replayed', closed_at = clock_timestamp()
where id = $1 and source = 'consumer' and consumer = $2 and state = 'replaying'
	and token = $3 and token <> '' and payload = $4`

	postgresDiscard = `
update {{dead_letters}}
set state = case state when 'held' then 'discarding' else 'discarded' end,
	closed_at = case state when 'held' then null else clock_timestamp() end,
	acted_at = clock_timestamp(), acted_by = $2, acted_reason = $3
where id = any ($1::bigint[]) and (state in ('dead', 'held') or state = 'replaying' and source = 'consumer')
returning id`

	// By the partial index on closed_at, and by primary key. Concurrent calls take
	// different rows. statement_timestamp() can be used in an index condition.
	postgresForget = `
delete from {{dead_letters}}
where id = any (array(
	select id
	from {{dead_letters}}
	where closed_at < statement_timestamp() - $1::bigint * interval '1 microsecond'
	order by closed_at
	limit $2
	for update skip locked
))`
)
