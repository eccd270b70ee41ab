-- name: check_sequence
-- The highest ids come from the indexes on id. As on PostgreSQL, ids that no sequence can
-- have given out do not count. {{outbox}} is quoted; sqlite_sequence holds the bare name.
with last (id) as (
	select coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0)
), possible (id) as (
	select min(id, 9223372036854775807 - (1 << 48)) + (1 << 48) from last
)
select
	(select id from last),
	max(
		(select coalesce(max(id), 0) from {{outbox}} where id <= (select id from possible)),
		(select coalesce(max(id), 0) from {{outbox_history}} where id <= (select id from possible))
	);

-- name: forged
-- By the indexes on id.
with last (id) as (
	select coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0)
), possible (id) as (
	select min(id, 9223372036854775807 - (1 << 48)) + (1 << 48) from last
)
select lane, id, message_id
from {{outbox}}
where id > (select id from possible)
union all
select lane, id, message_id
from {{outbox_history}}
where id > (select id from possible)
limit 10;

-- name: last_id
-- sqlite_sequence has a row for each table.
select coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0);

-- name: repaired_id
-- What the sequence is to be set to: at least ?1. By the same indexes as check_sequence.
with last (id) as (
	select coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0)
), possible (id) as (
	select min(id, 9223372036854775807 - (1 << 48)) + (1 << 48) from last
)
select max(
	(select id from last),
	max(
		(select coalesce(max(id), 0) from {{outbox}} where id <= (select id from possible)),
		(select coalesce(max(id), 0) from {{outbox_history}} where id <= (select id from possible))
	),
	?1
);

-- name: delete_sequence
-- sqlite_sequence has no unique name to update by.
delete from sqlite_sequence
where '"' || name || '"' = '{{outbox}}';

-- name: insert_sequence
-- Follows delete_sequence.
insert into sqlite_sequence (name, seq)
values (trim('{{outbox}}', '"'), ?1);
