package relay

import "github.com/oncemill/oncemill/internal/database"

// sqliteParkingTexts are statements with their names filled in.
type sqliteParkingTexts struct {
	keys, topics, heads, rows          string
	find, piece                        string
	fence, cleared                     string
	outboxKey, park, buryOutbox, unbox string
	again, postpone                    string
	hold, heldLetter, bury             string
	unpark, dropHeld                   string
	giveTime, takeTime, keyThere       string
	letter, replay, close              string
	settleMove, closeLetters           string
	suspect, calm, beyond, ofKeys      string
	unanswered, maybeDelivered         string
}

func newSQLiteParkingTexts(names database.Database) sqliteParkingTexts {
	x := names.Expand
	return sqliteParkingTexts{
		keys: x(sqliteParkedKeys), topics: x(sqliteParkedTopics), heads: x(sqliteHeads), rows: x(sqliteRows), find: x(sqliteFind), piece: x(sqliteParkedPiece),
		fence: x(sqliteFence), cleared: x(sqliteCleared),
		outboxKey: x(sqliteOutboxKey), park: x(sqlitePark), buryOutbox: x(sqliteBuryOutbox), unbox: x(sqliteUnbox),
		again: x(sqliteAgain), postpone: x(sqlitePostpone), hold: x(sqliteHold), heldLetter: x(sqliteHeldLetter), bury: x(sqliteBury),
		unpark: x(sqliteUnpark), dropHeld: x(sqliteDropHeld),
		giveTime: x(sqliteGiveTime), takeTime: x(sqliteTakeTime), keyThere: x(sqliteKeyThere),
		letter: x(sqliteLetter), replay: x(sqliteReplay), close: x(sqliteClose),
		settleMove: x(sqliteSettleMove), closeLetters: x(sqliteCloseLetters),
		suspect: x(sqliteSuspect), calm: x(sqliteCalm), beyond: x(sqliteBeyond), ofKeys: x(sqliteOfKeys),
		unanswered: x(sqliteUnanswered), maybeDelivered: x(sqliteMaybeDelivered),
	}
}

// Reads, all by index.
const (
	// By the index (lane, id), backwards: rows beyond come last. It ends at the first
	// matching row.
	sqliteBeyond = `
select n.id
from (select o.id, o.topic from {{outbox}} o where o.lane = ?1 order by o.id desc limit ?3) n
where n.topic not in (select t.value from json_each(?2) t)
limit 1`

	// By the partial index on (lane, key) of heads.
	sqliteParkedKeys = `
select p.lane, p.key
from {{parked}} p
where p.lane in (select value from json_each(?1))
	and p.key > ''
	and (p.next_at is not null or p.held)`

	// By the partial index (lane, topic, next_at), which holds only heads, from each
	// topic to the next, with the time of its first.
	sqliteParkedTopics = `
with recursive t (lane, topic, place) as (
	select l.value, (
		select p.topic from {{parked}} p where p.lane = l.value and p.next_at is not null and p.topic > ?2 order by p.topic limit 1
	), 1
	from json_each(?1) l
	union all
	select t.lane, (
		select p.topic
		from {{parked}} p
		where p.lane = t.lane and p.next_at is not null and p.topic > t.topic
		order by p.topic
		limit 1
	), t.place + 1
	from t
	where t.topic is not null and t.place < ?3
)
select lane, topic, (
	select p.next_at from {{parked}} p where p.lane = t.lane and p.topic = t.topic and p.next_at is not null order by p.next_at limit 1
) - ` + sqliteNow + `, place
from t
where topic is not null`

	// By the same index. It is read no further than needed.
	sqliteHeads = `
select lane, id, key, next_at - ` + sqliteNow + `, created_at
from {{parked}}
where lane = ?1 and topic = ?2 and next_at is not null
order by next_at`

	// By the index (lane, key, id). It is read no further than needed.
	sqliteRows = `
select lane, id, topic, message_id, key, payload, metadata, created_at,
	attempts, json_array_length(errors) > 0, crashed, unanswered, held, ` + sqliteNow + ` - parked_at
from {{parked}}
where lane = ?1 and key = ?2 and id >= ?3
order by id`

	// By the primary keys.
	sqliteFind = `
select lane, id, topic, message_id, key, created_at, attempts, json_array_length(errors) > 0, crashed, unanswered, ` + sqliteNow + ` - parked_at, 1
from {{parked}}
where lane = ?1 and id = ?2
union all
select lane, id, topic, message_id, key, created_at, 0, 0, 0, 0, 0, 0
from {{outbox}}
where lane = ?1 and id = ?2
limit 1`

	sqliteParkedPiece = `
select substr(payload, ?5, ?6) from {{parked}} where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4`

	// By the partial index of commands; the oldest message first.
	sqliteCommands = `
select * from (
	select id, lane, key, row_id
	from {{dead_letters}}
	where lane = ?lane and source = 'relay' and state in ('replaying', 'discarding')
	order by row_id, id
	limit ?1
)`

	sqliteKeyThere = `select exists (select 1 from {{parked}} where lane = ?1 and key = ?2)`

	sqliteLetter = `
select state, key, row_id, message_id, created_at
from {{dead_letters}}
where id = ?1 and lane = ?2 and source = 'relay'`
)

// Writes: one row at a time, by primary key, in a transaction that is the only writer.
// Rows are matched by lane, id, message id and creation time, ?1 to ?4; ?5 to ?7 are
// the attempt, its class and its text.
const (
	sqliteFence = `select count(*) from {{relay_leases}} where lane = ?1 and owner = ?2 and epoch = ?3`

	// A suspect that is recorded as failed is cleared.
	sqliteCleared = `update {{relay_leases}} set suspect = null where lane = ?1 and suspect = ?2`

	sqliteRow = `
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4`

	// By the index (lane, id), from the start of the lane.
	sqliteOfKeys = `
select id, message_id, created_at
from {{outbox}}
where lane = ?1 and key in (select value from json_each(?2))
order by id
limit ?3`

	sqliteOutboxKey = `select key from {{outbox}}` + sqliteRow

	sqliteUnbox = `delete from {{outbox}}` + sqliteRow

	sqliteError = `json_object('at', ` + sqliteNow + `, 'class', ?6, 'text', ?7)`

	sqliteErrors = `json_insert(
		case when json_array_length(errors) < 10 then errors else json_remove(errors, '$[0]') end, '$[#]', ` + sqliteError + `)`

	sqlitePark = `
insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, attempts, next_at, crashed, held, errors)
select lane, id, topic, message_id, key, payload, metadata, created_at,
	?5, ` + sqliteNow + ` + ?8, ?6 = 'crashed', ?9, case when ?6 = '' then '[]' else json_array(` + sqliteError + `) end
from {{outbox}}` + sqliteRow + `
on conflict do nothing`

	sqliteLetterColumns = `
insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
	reason, error, attempts, fingerprint, errors, state, held, maybe_delivered)
select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
	?6, ?7, ?5, ?8, `

	sqliteBuryOutbox = sqliteLetterColumns + `json_array(` + sqliteError + `), ?9, ?10, 0
from {{outbox}}` + sqliteRow

	sqliteFailing = sqliteRow + ` and attempts = ?5 - 1 and not held`

	sqliteBury = sqliteLetterColumns + sqliteErrors + `, 'dead', 0, unanswered
from {{parked}}` + sqliteFailing

	sqliteHeldLetter = sqliteLetterColumns + `errors, 'held', 1, unanswered
from {{parked}}` + sqliteRow

	// A row without a time is not a head and gets none.
	sqliteAgain = `
update {{parked}}
set attempts = ?5, next_at = case when next_at is not null then ` + sqliteNow + ` + ?8 end,
	crashed = crashed or ?6 = 'crashed', parked_at = iif(?5 = 1, ` + sqliteNow + `, parked_at),
	errors = ` + sqliteErrors + sqliteFailing

	// For a message that may have been delivered, in parked and in its dead letter.
	sqliteUnanswered = `update {{parked}} set unanswered = 1` + sqliteRow

	sqliteMaybeDelivered = `
update {{dead_letters}}
set maybe_delivered = 1
where source = 'relay' and closed_at is null
	and lane = ?1 and row_id = ?2 and message_id = ?3 and created_at = ?4`

	// A row that has failed at no charge waits longer.
	sqlitePostpone = `
update {{parked}}
set next_at = case when next_at is not null then ` + sqliteNow + ` + ?8 end, errors = ` + sqliteErrors + sqliteRow + ` and attempts = ?5 and not held`

	sqliteHold = `
update {{parked}}
set attempts = ?5, next_at = null, held = 1, crashed = crashed or ?6 = 'crashed', errors = ` + sqliteErrors + sqliteFailing

	sqliteUnpark = `delete from {{parked}}` + sqliteRow + ` returning key`

	sqliteDropHeld = `delete from {{parked}}` + sqliteRow + ` and held returning key`

	// By the index (lane, key, id), and by the partial one of rows with a time.
	sqliteFirst = `(select rowid from {{parked}} where lane = ?1 and key = ?2 order by id limit 1)`

	sqliteGiveTime = `
update {{parked}}
set next_at = ` + sqliteNow + `
where rowid = ` + sqliteFirst + ` and next_at is null and not held`

	sqliteTakeTime = `
update {{parked}}
set next_at = null
where lane = ?1 and key = ?2 and next_at is not null and rowid <> ` + sqliteFirst

	// Back to parked; or it is there, held, and is released.
	sqliteReplay = `
insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
select lane, row_id, topic, message_id, key, payload, metadata, created_at, ` + sqliteNow + `
from {{dead_letters}}
where id = ?1
on conflict (lane, id, message_id, created_at) do update
set next_at = excluded.next_at, held = 0, attempts = 0, crashed = 0, errors = '[]', parked_at = excluded.parked_at`

	sqliteClose = `
update {{dead_letters}}
set state = ?2, version = version + 1, closed_at = ` + sqliteNow + `
where id = ?1`

	sqliteSettleMove = `
insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
select id, lane, topic, message_id, key, payload, metadata, created_at, ` + sqliteNow + `
from {{parked}}` + sqliteRow

	// A message that the broker has confirmed is no dead letter, even if somebody gave
	// it up meanwhile.
	sqliteCloseLetters = `
update {{dead_letters}}
set state = 'replayed', version = version + 1, closed_at = ` + sqliteNow + `, acted_at = ` + sqliteNow + `,
	acted_by = 'relay', acted_reason = 'confirmed by the broker after it was given up'
where source = 'relay' and closed_at is null
	and lane = ?1 and row_id = ?2 and message_id = ?3 and created_at = ?4`

	sqliteSuspect = `
update {{relay_leases}}
set suspect = nullif(?4, 0)
where lane = ?1 and owner = ?2 and epoch = ?3`

	sqliteCalm = `update {{relay_leases}} set crashes = 0, suspect = null where owner = ?1 and lane = ?2 and epoch = ?3`
)
