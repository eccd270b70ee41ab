-- name: list_history
-- By the index on id of each day, merged: a page reads from where the previous one ended.
-- Rows added meanwhile may have any id; a page shows its snapshot. Planned for its
-- parameters at each execution. A condition that is not set thus disappears before a plan
-- is chosen, and times select the days. With $10, contents of
-- messages are not read.
select
	h.lane, h.id, h.topic, h.message_id, h.key,
	case when $10::boolean then '' else h.payload end, case when $10::boolean then '' else h.metadata end, octet_length(h.payload),
	(date_part('epoch', h.created_at) * 1000000)::bigint, (date_part('epoch', h.relayed_at) * 1000000)::bigint
from {{outbox_history}} h
where ($1::bigint[] is null or h.id = any ($1::bigint[]))
	and ($2::text[] is null or h.message_id = any ($2::text[]))
	and ($3::text = '' or h.key = $3::text)
	and ($4::text = '' or h.topic = $4::text)
	and ($5::timestamptz is null or h.relayed_at >= $5::timestamptz)
	and ($6::timestamptz is null or h.relayed_at < $6::timestamptz)
	and ($7::bigint = 0 or h.id >= $7::bigint and (h.id, h.relayed_at) > ($7::bigint, $8::timestamptz))
order by h.id, h.relayed_at
limit $9;

-- name: count_history
-- Planned for its parameters, as list_history.
-- scans: outbox_history: with ids or times it uses their indexes, otherwise it reads all
select count(*)
from (
	select distinct h.message_id, h.topic
	from {{outbox_history}} h
	where ($1::bigint[] is null or h.id = any ($1::bigint[]))
		and ($2::text[] is null or h.message_id = any ($2::text[]))
		and ($3::text = '' or h.key = $3::text)
		and ($4::text = '' or h.topic = $4::text)
		and ($5::timestamptz is null or h.relayed_at >= $5::timestamptz)
		and ($6::timestamptz is null or h.relayed_at < $6::timestamptz)
) m;

-- name: resend
-- Planned for its parameters, as list_history. Ids are taken after the sort. The rows
-- stay in the history: what is inserted is a copy, so two concurrent calls only send
-- twice.
-- scans: outbox_history: with ids or times it uses their indexes, otherwise it reads all
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata, created_at)
select lane, topic, message_id, key, payload, metadata, created_at
from (
	select distinct on (h.message_id, h.topic) h.*
	from {{outbox_history}} h
	where ($1::bigint[] is null or h.id = any ($1::bigint[]))
		and ($2::text[] is null or h.message_id = any ($2::text[]))
		and ($3::text = '' or h.key = $3::text)
		and ($4::text = '' or h.topic = $4::text)
		and ($5::timestamptz is null or h.relayed_at >= $5::timestamptz)
		and ($6::timestamptz is null or h.relayed_at < $6::timestamptz)
	order by h.message_id, h.topic, h.id, h.relayed_at
) first
order by id, relayed_at
limit $7;

-- name: now
-- The server's time.
select clock_timestamp();

-- name: days
-- The server's time, and the days that have a partition, as YYYYMMDD, with whether it has
-- rows. Without any, one row with an empty name. A day that is dropped meanwhile has no
-- size.
select clock_timestamp(), coalesce(right(c.relname, 8), ''), coalesce(pg_relation_size(c.oid) > 0, false)
from (values (1)) one
left join (pg_inherits i join pg_class c on c.oid = i.inhrelid) on i.inhparent = '{{outbox_history}}'::regclass
order by 2;

-- name: lock_history
-- The upkeep excludes other upkeep with it, but no move and no reader. Attaching a
-- partition takes it anyway.
lock table {{outbox_history}} in share update exclusive mode;

-- name: has_day
-- Whether the day has a partition. Follows lock_history.
select exists (
	select
	from pg_inherits i
	where i.inhparent = '{{outbox_history}}'::regclass
		and i.inhrelid = to_regclass('{{outbox_history_#}}')
);

-- name: add_day
-- CREATE and ATTACH, unlike CREATE ... PARTITION OF, do not block moves of other
-- sessions. There is no key; where a publication for all tables publishes deletions,
-- the archive's would fail without an identity.
create table {{outbox_history_#}} (like {{outbox_history}} including all);
alter table {{outbox_history_#}} replica identity full;
alter table {{outbox_history}} attach partition {{outbox_history_#}}
	for values from (timestamptz '# 00:00:00+00') to (timestamptz '# 00:00:00+00' + interval '24 hours');

-- name: day_empty
-- Reads to the first row. See partition_empty.
-- scans: outbox_history: it ends at the first row
select not exists (select from {{outbox_history_#}});

-- name: lock_day_writers
-- See lock_partition_writers.
lock table {{outbox_history_#}} in share row exclusive mode;

-- name: lock_day
-- See lock_partition.
lock table {{outbox_history_#}} in access exclusive mode;

-- name: truncate_day
-- A day past its retention. It is dropped later, when no reader remembers it.
truncate {{outbox_history_#}};

-- name: drop_day
-- A day that was emptied long ago.
drop table {{outbox_history_#}};

-- name: archive_read
-- By the index on id of the day. $1 is the last id of the previous batch, behind entries
-- of deleted rows that vacuum has not removed yet; $2 the number of rows, $3 the byte
-- budget.
select
	h.lane, h.id, h.topic, h.message_id, h.key, h.payload, h.metadata, octet_length(h.payload),
	(date_part('epoch', h.created_at) * 1000000)::bigint, (date_part('epoch', h.relayed_at) * 1000000)::bigint
from (
	select f.*,
		sum(octet_length(f.payload) + octet_length(f.metadata))
			over (order by f.id rows between unbounded preceding and 1 preceding) as bytes_before
	from (select * from {{outbox_history_#}} where id > $1 order by id limit $2) f
) h
where coalesce(h.bytes_before, 0) < $3
order by h.id;

-- name: archive_delete
-- By the index on id of the day. Only other archivers write to a day that is past its
-- retention.
delete from {{outbox_history_#}} h
using unnest((select $1::bigint[]), (select $2::text[]), (select $3::bigint[])) as c (id, message_id, relayed_micros)
where h.id = c.id
	and h.message_id = c.message_id
	and h.relayed_at = timestamptz 'epoch' + c.relayed_micros * interval '1 microsecond';
