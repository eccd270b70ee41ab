-- compatible: 1
-- token: the replay of a consumer's letter carries it, so that nobody else can make one.
-- It is random, of the last replay, and kept when that ends: a late copy is recognised.
alter table {{dead_letters}} add column token text not null default '';

-- Counts the changes of the state, and gives each replay its token. Roles that act on
-- letters need no right on these columns, and so cannot choose what is in them.
create or replace function {{dead_letters_version}}() returns trigger
language plpgsql
as $$
begin
	new.version := old.version + 1;
	if new.state = 'replaying' and new.source = 'consumer' then
		new.token := replace(gen_random_uuid()::text, '-', '');
	end if;
	return new;
end
$$;

update {{dead_letters}}
set token = replace(gen_random_uuid()::text, '-', '')
where state = 'replaying' and source = 'consumer';
