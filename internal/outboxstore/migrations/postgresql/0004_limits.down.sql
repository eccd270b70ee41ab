drop function {{scheduled_cancel}}(text);

alter table {{scheduled}}
	drop constraint {{name:scheduled_seq_limit}},
	drop constraint {{name:scheduled_topic_limit}},
	drop constraint {{name:scheduled_message_id_limit}},
	drop constraint {{name:scheduled_key_limit}},
	drop constraint {{name:scheduled_metadata_limit}},
	drop constraint {{name:scheduled_payload_limit}},
	drop constraint {{name:scheduled_deliver_at_limit}};

alter table {{outbox}}
	drop constraint {{name:outbox_id_limit}},
	drop constraint {{name:outbox_topic_limit}},
	drop constraint {{name:outbox_message_id_limit}},
	drop constraint {{name:outbox_key_limit}},
	drop constraint {{name:outbox_metadata_limit}},
	drop constraint {{name:outbox_payload_limit}},
	drop constraint {{name:outbox_created_at_limit}};

alter table {{outbox_0}} reset (vacuum_truncate, toast.vacuum_truncate);
alter table {{outbox_1}} reset (vacuum_truncate, toast.vacuum_truncate);
alter table {{outbox_2}} reset (vacuum_truncate, toast.vacuum_truncate);
alter table {{outbox_3}} reset (vacuum_truncate, toast.vacuum_truncate);
alter table {{scheduled}} reset (vacuum_truncate, toast.vacuum_truncate);
