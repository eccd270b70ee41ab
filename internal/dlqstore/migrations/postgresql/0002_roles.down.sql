drop trigger {{name:dead_letters_version}} on {{dead_letters}};
drop function {{dead_letters_version}}();

drop index {{dead_letters_topic}};
drop index {{dead_letters_message}};
drop index {{dead_letters_key}};
create index {{name:dead_letters_topic}} on {{dead_letters}} (topic, died_at, id);
create index {{name:dead_letters_message}} on {{dead_letters}} (message_id, died_at, id);
create index {{name:dead_letters_key}} on {{dead_letters}} (key, died_at, id) where key <> '';

alter table {{dead_letters}}
	drop constraint {{name:dead_letters_times_limit}},
	drop column maybe_delivered;

alter table {{dead_letters}} reset (vacuum_truncate, toast.vacuum_truncate);
