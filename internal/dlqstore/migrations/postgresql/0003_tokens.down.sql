create or replace function {{dead_letters_version}}() returns trigger
language plpgsql
as $$
begin
	new.version := old.version + 1;
	return new;
end
$$;

alter table {{dead_letters}} drop column token;
