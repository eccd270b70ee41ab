-- compatible: 3
-- Limits for all programs that write rows: those of Publish, and ids and times that a
-- relay can work with (a double holds the microseconds of the times exactly). Existing
-- rows of the outbox are not checked, since they leave soon. Scheduled rows are, since
-- they become rows of the outbox later.
alter table {{outbox}}
	add constraint {{name:outbox_id_limit}} check (id between 1 and 4611686018427387904) not valid,
	add constraint {{name:outbox_topic_limit}} check (octet_length(topic) between 1 and 255) not valid,
	add constraint {{name:outbox_message_id_limit}} check (octet_length(message_id) between 1 and 255) not valid,
	add constraint {{name:outbox_key_limit}} check (octet_length(key) <= 255) not valid,
	add constraint {{name:outbox_metadata_limit}} check (octet_length(metadata) <= 65536) not valid,
	add constraint {{name:outbox_payload_limit}} check (octet_length(payload) <= 134217728) not valid,
	add constraint {{name:outbox_created_at_limit}} check (created_at between '1970-01-01 00:00:00+00' and '2200-01-01 00:00:00+00') not valid;

alter table {{scheduled}}
	add constraint {{name:scheduled_seq_limit}} check (seq between 1 and 4611686018427387904),
	add constraint {{name:scheduled_topic_limit}} check (octet_length(topic) between 1 and 255),
	add constraint {{name:scheduled_message_id_limit}} check (octet_length(message_id) between 1 and 255),
	add constraint {{name:scheduled_key_limit}} check (octet_length(key) <= 255),
	add constraint {{name:scheduled_metadata_limit}} check (octet_length(metadata) <= 65536),
	add constraint {{name:scheduled_payload_limit}} check (octet_length(payload) <= 134217728),
	add constraint {{name:scheduled_deliver_at_limit}} check (deliver_at between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00');

-- Cancels a scheduled message, for roles that may not delete from the table: the right
-- to delete would permit them to lock it, and would need select. It waits for a move of
-- the same row, and then finds it gone; a move does not wait for it. Served by the index
-- on message_id.
create function {{scheduled_cancel}}(text) returns setof bigint
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$ delete from {{scheduled}} where message_id = $1 returning seq $$;

revoke all on function {{scheduled_cancel}}(text) from public;

-- Vacuum truncates a table under a lock that a standby replays. Queries there wait for
-- it, or are canceled. The relay truncates where there is no standby.
alter table {{outbox_0}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
alter table {{outbox_1}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
alter table {{outbox_2}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
alter table {{outbox_3}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
alter table {{scheduled}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
