-- compatible: 1
-- former_tokens: those of earlier replays, the last ones first, 32 characters each. A replay
-- that was discarded may still be in a queue when the dead letter is restored and replayed
-- again. Its message is recognized by its token, and is no message for anybody.
alter table {{dead_letters}} add column former_tokens text not null default '';

-- Counts the changes of the state, and gives each replay its token. Roles that act on
-- letters need no right on these columns, and so cannot choose what is in them. An edit is
-- for one replay.
create or replace function {{dead_letters_version}}() returns trigger
language plpgsql
as $$
begin
	new.version := old.version + 1;
	if new.state not in ('replaying', 'replayed') then
		new.edited := false;
	end if;
	if new.state = 'replaying' and new.source = 'consumer' then
		new.former_tokens := left(old.token || old.edit_token || old.former_tokens, 3200);
		new.token := case when new.edited then '' else replace(gen_random_uuid()::text, '-', '') end;
		new.edit_token := case when new.edited then replace(gen_random_uuid()::text, '-', '') else '' end;
	end if;
	return new;
end
$$;
