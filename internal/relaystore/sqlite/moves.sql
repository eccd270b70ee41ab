-- One row at a time, in transactions that are the only writer from their start; those
-- that need the fence have read it. Rows are matched by lane, id, message id and
-- creation time, ?1 to ?4; ?5 to ?7 are the attempt, its class and its text.

-- name: retry
-- Outbox to parked. A follower has no class and no wait (?8): it gets its time, if it is a
-- head, from set_head_time, or here if it has no key. By primary key.
insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, attempts, next_at, crashed, held, errors)
select lane, id, topic, message_id, key, payload, metadata, created_at,
	?5, iif(?9, null, cast(unixepoch('subsec') * 1000000 as integer) + coalesce(?8, iif(key = '', 0, null))),
	?6 = 'crashed', ?9,
	case when ?6 = '' then '[]' else json_array(json_object('at', cast(unixepoch('subsec') * 1000000 as integer), 'class', ?6, 'text', ?7)) end
from {{outbox}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4
on conflict do nothing;

-- name: dead_letter
-- Outbox to dead letters. By primary key.
insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
	reason, error, attempts, fingerprint, errors, state, held, maybe_delivered)
select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
	?6, ?7, ?5, ?8,
	json_array(json_object('at', cast(unixepoch('subsec') * 1000000 as integer), 'class', ?6, 'text', ?7)),
	?9, ?10, 0
from {{outbox}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4;

-- name: delete_from_outbox
-- After its copies. By primary key.
delete from {{outbox}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4
returning key;

-- name: retry_again
-- One more failed attempt. A row without a time is not a head and gets none. By
-- primary key.
update {{parked}}
set attempts = ?5, next_at = case when next_at is not null then cast(unixepoch('subsec') * 1000000 as integer) + ?8 end,
	crashed = crashed or ?6 = 'crashed', parked_at = iif(?5 = 1, cast(unixepoch('subsec') * 1000000 as integer), parked_at),
	errors = json_insert(
		case when json_array_length(errors) < 10 then errors else json_remove(errors, '$[0]') end,
		'$[#]', json_object('at', cast(unixepoch('subsec') * 1000000 as integer), 'class', ?6, 'text', ?7)
	)
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4 and attempts = ?5 - 1 and not held;

-- name: postpone
-- A row that has failed without being charged waits longer. By primary key.
update {{parked}}
set next_at = case when next_at is not null then cast(unixepoch('subsec') * 1000000 as integer) + ?8 end,
	errors = json_insert(
		case when json_array_length(errors) < 10 then errors else json_remove(errors, '$[0]') end,
		'$[#]', json_object('at', cast(unixepoch('subsec') * 1000000 as integer), 'class', ?6, 'text', ?7)
	)
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4 and attempts = ?5 and not held;

-- name: hold_key
-- The row stays and is held. By primary key.
update {{parked}}
set attempts = ?5, next_at = null, held = 1, crashed = crashed or ?6 = 'crashed',
	errors = json_insert(
		case when json_array_length(errors) < 10 then errors else json_remove(errors, '$[0]') end,
		'$[#]', json_object('at', cast(unixepoch('subsec') * 1000000 as integer), 'class', ?6, 'text', ?7)
	)
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4 and attempts = ?5 - 1 and not held;

-- name: dead_letter_held
-- The dead letter of a row that is held. By primary key.
insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
	reason, error, attempts, fingerprint, errors, state, held, maybe_delivered)
select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
	?6, ?7, ?5, ?8, errors, 'held', 1, unanswered
from {{parked}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4;

-- name: dead_letter_retrying
-- Parked to dead letters. By primary key.
insert into {{dead_letters}} (source, lane, row_id, topic, message_id, key, payload, metadata, created_at,
	reason, error, attempts, fingerprint, errors, state, held, maybe_delivered)
select 'relay', lane, id, topic, message_id, key, payload, metadata, created_at,
	?6, ?7, ?5, ?8,
	json_insert(
		case when json_array_length(errors) < 10 then errors else json_remove(errors, '$[0]') end,
		'$[#]', json_object('at', cast(unixepoch('subsec') * 1000000 as integer), 'class', ?6, 'text', ?7)
	),
	'dead', 0, unanswered
from {{parked}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4 and attempts = ?5 - 1 and not held;

-- name: mark_unanswered
-- The message may have been delivered. By primary key.
update {{parked}}
set unanswered = 1
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4;

-- name: mark_maybe_delivered
-- The same for its dead letter. By the partial index of open dead letters.
update {{dead_letters}}
set maybe_delivered = 1
where source = 'relay' and closed_at is null
	and lane = ?1 and row_id = ?2 and message_id = ?3 and created_at = ?4;

-- name: delete_retrying
-- A confirmed row, whoever holds the lane, or one that became a dead letter. By
-- primary key, in a transaction that is the only writer.
delete from {{parked}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4
returning key;

-- name: delete_held
-- By primary key.
delete from {{parked}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4 and held
returning key;

-- name: set_head_time
-- The first row of a key, by the index (lane, key, id), unless it is held. In a
-- transaction that is the only writer, after its other writes.
update {{parked}}
set next_at = cast(unixepoch('subsec') * 1000000 as integer)
where rowid = (select rowid from {{parked}} where lane = ?1 and key = ?2 order by id limit 1)
	and next_at is null and not held;

-- name: clear_other_times
-- The other rows of a key, by the partial index (lane, key) of rows with a time. In a
-- transaction that is the only writer, after its other writes.
update {{parked}}
set next_at = null
where lane = ?1 and key = ?2 and next_at is not null
	and rowid <> (select rowid from {{parked}} where lane = ?1 and key = ?2 order by id limit 1);

-- name: replay
-- Dead letter to parked; or the row is there, held, and is released. By primary key.
insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, unanswered, next_at)
select lane, row_id, topic, message_id, key, payload, metadata, created_at, maybe_delivered, cast(unixepoch('subsec') * 1000000 as integer)
from {{dead_letters}}
where id = ?1
on conflict (lane, id, message_id, created_at) do update
set next_at = excluded.next_at, held = 0, attempts = 0, crashed = 0, errors = '[]', parked_at = excluded.parked_at;

-- name: close_dead_letter
-- By primary key.
update {{dead_letters}}
set state = ?2, version = version + 1, closed_at = cast(unixepoch('subsec') * 1000000 as integer)
where id = ?1;

-- name: keep_history
-- A confirmed row, before its deletion in the same transaction. By primary key.
insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
select id, lane, topic, message_id, key, payload, metadata, created_at, cast(unixepoch('subsec') * 1000000 as integer)
from {{parked}}
where lane = ?1 and id = ?2 and message_id = ?3 and created_at = ?4;

-- name: close_dead_letters
-- By the partial index of open dead letters. A message that the broker has confirmed
-- is no dead letter, even if somebody gave it up meanwhile.
update {{dead_letters}}
set state = 'replayed', version = version + 1, closed_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_at = cast(unixepoch('subsec') * 1000000 as integer),
	acted_by = 'relay', acted_reason = 'confirmed by the broker after it was given up'
where source = 'relay' and closed_at is null
	and lane = ?1 and row_id = ?2 and message_id = ?3 and created_at = ?4;

-- name: retry_now
-- Retrying messages of a topic, or of all topics, by the partial index (lane, topic, next_at):
-- those that are not due, and have not failed since ?4, in microseconds, are due.
update {{parked}}
set next_at = cast(unixepoch('subsec') * 1000000 as integer)
where rowid in (
	select rowid
	from {{parked}}
	where lane = ?1
		and (?2 = '' or topic = ?2)
		and next_at > cast(unixepoch('subsec') * 1000000 as integer)
		and coalesce(json_extract(errors, '$[#-1].at'), 0) < ?4
	limit ?3
);

-- name: retry_key_now
-- The first message of a key, by (lane, key, id), as retry_now.
update {{parked}}
set next_at = cast(unixepoch('subsec') * 1000000 as integer)
where rowid in (
	select rowid
	from {{parked}}
	where lane = ?1
		and key = ?5
		and (?2 = '' or topic = ?2)
		and next_at > cast(unixepoch('subsec') * 1000000 as integer)
		and coalesce(json_extract(errors, '$[#-1].at'), 0) < ?4
	limit ?3
);
