-- name: now
-- The clock of the machine.
select cast(unixepoch('subsec') * 1000000 as integer);

-- name: list_history
-- By the index on relayed_at, and sorted. With ?10, contents of messages are not read.
select h.lane, h.id, h.topic, h.message_id, h.key,
	case when ?10 then x'' else h.payload end, case when ?10 then x'' else h.metadata end, octet_length(h.payload), h.created_at, h.relayed_at
from {{outbox_history}} h
where (?1 is null or h.id in (select value from json_each(?1)))
	and (?2 is null or h.message_id in (select value from json_each(?2)))
	and (?3 = '' or h.key = ?3)
	and (?4 = '' or h.topic = ?4)
	and h.relayed_at >= ?5
	and h.relayed_at < ?6
	and (h.id, h.relayed_at) > (?7, ?8)
order by h.id, h.relayed_at
limit ?9;

-- name: count_history
-- By the index on relayed_at.
select count(*)
from (
	select distinct h.message_id, h.topic
	from {{outbox_history}} h
	where (?1 is null or h.id in (select value from json_each(?1)))
		and (?2 is null or h.message_id in (select value from json_each(?2)))
		and (?3 = '' or h.key = ?3)
		and (?4 = '' or h.topic = ?4)
		and h.relayed_at >= ?5
		and h.relayed_at < ?6
);

-- name: resend
-- By the index on relayed_at. Ids are taken after the sort.
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata, created_at)
select lane, topic, message_id, key, payload, metadata, created_at
from (
	select h.*, row_number() over (partition by h.message_id, h.topic order by h.id, h.relayed_at) as n
	from {{outbox_history}} h
	where (?1 is null or h.id in (select value from json_each(?1)))
		and (?2 is null or h.message_id in (select value from json_each(?2)))
		and (?3 = '' or h.key = ?3)
		and (?4 = '' or h.topic = ?4)
		and h.relayed_at >= ?5
		and h.relayed_at < ?6
)
where n = 1
order by id, relayed_at
limit ?7;

-- name: has_expired
-- By the index on relayed_at.
select exists (select 1 from {{outbox_history}} where relayed_at < cast(unixepoch('subsec') * 1000000 as integer) - ?1);

-- name: purge
-- By the index on relayed_at. A few at a time, by rows and by bytes, so that others need
-- not wait for their turn to write.
delete from {{outbox_history}}
where rowid in (
	select rowid
	from (
		select
			rowid,
			sum(length(payload) + length(metadata))
				over (order by relayed_at, rowid rows between unbounded preceding and 1 preceding) as bytes_before
		from (
			select rowid, relayed_at, payload, metadata
			from {{outbox_history}}
			where relayed_at < cast(unixepoch('subsec') * 1000000 as integer) - ?1
			order by relayed_at
			limit ?2
		)
	)
	where coalesce(bytes_before, 0) < ?3
);

-- name: archive_read
-- By the index on relayed_at.
select h.rowid, h.lane, h.id, h.topic, h.message_id, h.key, h.payload, h.metadata, h.created_at, h.relayed_at
from {{outbox_history}} h
where h.relayed_at < cast(unixepoch('subsec') * 1000000 as integer) - ?1
order by h.relayed_at
limit ?2;

-- name: archive_delete
-- By rowid. A rowid may have been given out again, so the row is compared.
delete from {{outbox_history}}
where rowid = ?1 and id = ?2 and message_id = ?3 and relayed_at = ?4;
