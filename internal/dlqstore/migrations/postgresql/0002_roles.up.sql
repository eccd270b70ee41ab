-- compatible: 1
-- maybe_delivered: an attempt before the one that failed for good was not answered,
-- so the broker may have the message all the same.
--
-- Times that consumers and operators write are finite. A relay's letter holds what its
-- row holds, so there is no limit for that.
alter table {{dead_letters}}
	add column maybe_delivered boolean not null default false,
	add constraint {{name:dead_letters_times_limit}} check (
		died_at between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00'
		and coalesce(acted_at, died_at) between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00'
		and coalesce(closed_at, died_at) between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00'
		and (source = 'relay' or coalesce(created_at, died_at) between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00')
	) not valid;

-- An entry of an index has at most 2,704 bytes. Other programs write longer texts,
-- and such a message has to become a dead letter, too. 255 characters have at most
-- 1,020 bytes.
drop index {{dead_letters_topic}};
drop index {{dead_letters_message}};
drop index {{dead_letters_key}};
create index {{name:dead_letters_topic}} on {{dead_letters}} (left(topic, 255), died_at, id);
create index {{name:dead_letters_message}} on {{dead_letters}} (left(message_id, 255), died_at, id);
create index {{name:dead_letters_key}} on {{dead_letters}} (left(key, 255), died_at, id) where key <> '';

-- Counts the changes of the state. Roles that act on letters need no right on the
-- column, and so cannot set it to a value that has no successor.
create function {{dead_letters_version}}() returns trigger
language plpgsql
as $$
begin
	new.version := old.version + 1;
	return new;
end
$$;

create trigger {{name:dead_letters_version}}
before update on {{dead_letters}}
for each row when (old.state <> new.state)
execute function {{dead_letters_version}}();

-- Vacuum truncates a table under a lock that a standby replays.
alter table {{dead_letters}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
