-- compatible: 1
-- edited: the replay delivers edited_payload and edited_metadata. The message itself stays
-- as it is, and so does the last edit when the dead letter goes back to another state.
-- edit_token is the token of such a replay. It has a column of its own so that inboxes of
-- former versions, which know no edits, leave the replay alone instead of delivering the
-- original.
-- origin: what an imported dead letter is known by, so that it is imported once.
alter table {{dead_letters}}
	add column edited boolean not null default false,
	add column edit_token text not null default '',
	add column edited_payload bytea,
	add column edited_metadata bytea,
	add column edited_at timestamptz,
	add column edited_by text not null default '',
	add column edited_reason text not null default '',
	add column origin text not null default '',
	add constraint {{name:dead_letters_edited}} check (
		(not edited or source = 'consumer' and edited_payload is not null and edited_metadata is not null)
		and coalesce(edited_at, died_at) between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00'
		and octet_length(edited_by) <= 5000 and octet_length(edited_reason) <= 5000
	) not valid;

create unique index {{name:dead_letters_origin}} on {{dead_letters}} (origin) where origin <> '';

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
		new.token := case when new.edited then '' else replace(gen_random_uuid()::text, '-', '') end;
		new.edit_token := case when new.edited then replace(gen_random_uuid()::text, '-', '') else '' end;
	end if;
	return new;
end
$$;

-- What people know of a dead letter. Notes go with it.
create table {{dead_letter_notes}} (
	id     bigint      generated always as identity primary key,
	letter bigint      not null references {{dead_letters}} (id) on delete cascade,
	at     timestamptz not null default clock_timestamp(),
	actor  text        not null check (octet_length(actor) <= 5000),
	text   text        not null check (octet_length(text) <= 5000)
);

create index {{name:dead_letter_notes_letter}} on {{dead_letter_notes}} (letter, id);
