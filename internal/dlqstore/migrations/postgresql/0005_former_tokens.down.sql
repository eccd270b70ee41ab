create or replace function {{dead_letters_version}}() returns trigger
language plpgsql
as $$
begin
	new.version := old.version + 1;
	if new.state not in ('replaying', 'replayed') then
		new.edited := false;
	end if;
	if new.state = 'replaying' and new.source = 'consumer' then
		new.token := case when new.edited then '' else replace(gen_random_uuid()::text, '-', '') end;
		new.edit_token := case when new.edited then replace(gen_random_uuid()::text, '-', '') else '' end;
	end if;
	return new;
end
$$;

alter table {{dead_letters}} drop column former_tokens;
