package dlq

import "encoding/json"

func jsonList[T int64 | State](list []T) any {
	if list == nil {
		list = []T{}
	}
	text, _ := json.Marshal(list) // integers and strings cannot fail
	return string(text)
}

// SQLite has one writer at a time: a writing statement sees the latest state, and
// nothing changes in between.
const (
	sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

	sqliteColumns = `id, state, version, source, consumer, lane, row_id, topic, message_id, key,
	length(payload), created_at, died_at,
	reason, error, stack, attempts, trace_id, fingerprint, maybe_delivered,
	acted_by, acted_reason, acted_at, closed_at,
	metadata`

	// By the index on what a driver adds, or on (died_at, id), in its order. The other
	// conditions filter the rows of that index.
	sqliteGet = `select ` + sqliteColumns + `, payload, errors from {{dead_letters}} where id = $1`

	sqliteStates = `select id, state from {{dead_letters}} where id in (select value from json_each($1))`

	// By the index on what a driver adds, or on (died_at, id), in its order; the
	// other conditions are tested on what that brings.
	sqliteList = `
select ` + sqliteColumns + `
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
	and died_at < $11`

	sqliteOneState = ` and state = json_extract($2, '$[0]')`

	sqliteNewest = `
	and (died_at, id) < ($12, $13)
order by died_at desc, id desc
limit $1`

	sqliteOldest = `
	and (died_at, id) > ($12, $13)
order by died_at, id
limit $1`

	// By primary key: the unary plus keeps SQLite from using the index of states.
	sqliteReplay = `
update {{dead_letters}}
set state = 'replaying', version = version + 1, acted_at = ` + sqliteNow + `, acted_by = $2, acted_reason = $3
where id in (select value from json_each($1)) and +state in ('dead', 'held')
returning id`

	sqliteReplayed = `
update {{dead_letters}}
set state = 'replayed', version = version + 1, closed_at = ` + sqliteNow + `
where id = $1 and source = 'consumer' and consumer = $2 and state = 'replaying'
	and token = $3 and token <> '' and payload = $4`

	sqliteDiscard = `
update {{dead_letters}}
set state = case state when 'held' then 'discarding' else 'discarded' end,
	closed_at = case state when 'held' then null else ` + sqliteNow + ` end,
	version = version + 1, acted_at = ` + sqliteNow + `, acted_by = $2, acted_reason = $3
where id in (select value from json_each($1)) and (+state in ('dead', 'held') or +state = 'replaying' and source = 'consumer')
returning id`

	// By the partial index on closed_at.
	sqliteForget = `
delete from {{dead_letters}}
where id in (
	select id
	from {{dead_letters}}
	where closed_at < ` + sqliteNow + ` - $1
	order by closed_at
	limit $2
)`
)
