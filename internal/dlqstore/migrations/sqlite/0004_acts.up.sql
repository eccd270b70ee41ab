-- compatible: 1
-- edited: the replay delivers edited_payload and edited_metadata. The message itself stays
-- as it is, and so does the last edit when the dead letter goes back to another state.
-- edit_token is the token of such a replay. It has a column of its own so that inboxes of
-- former versions, which know no edits, leave the replay alone instead of delivering the
-- original.
-- origin: what an imported dead letter is known by, so that it is imported once.
alter table {{dead_letters}} add column edited integer not null default 0;
alter table {{dead_letters}} add column edit_token text not null default '';
alter table {{dead_letters}} add column edited_payload blob;
alter table {{dead_letters}} add column edited_metadata blob;
alter table {{dead_letters}} add column edited_at integer;
alter table {{dead_letters}} add column edited_by text not null default '';
alter table {{dead_letters}} add column edited_reason text not null default '';
alter table {{dead_letters}} add column origin text not null default '';

create unique index {{name:dead_letters_origin}} on {{dead_letters}} (origin) where origin <> '';

drop trigger {{name:dead_letters_token}};
create trigger {{name:dead_letters_token}}
after update of state on {{dead_letters}}
when new.state = 'replaying' and old.state <> 'replaying' and new.source = 'consumer'
begin
	update {{dead_letters}}
	set token = case when new.edited then '' else lower(hex(randomblob(16))) end,
		edit_token = case when new.edited then lower(hex(randomblob(16))) else '' end
	where id = new.id;
end;

-- What people know of a dead letter. Notes go with it.
create table {{dead_letter_notes}} (
	id     integer primary key autoincrement,
	letter integer not null,
	at     integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	actor  text    not null,
	text   text    not null
);

create index {{name:dead_letter_notes_letter}} on {{dead_letter_notes}} (letter, id);

create trigger {{name:dead_letter_notes_end}}
after delete on {{dead_letters}}
begin
	delete from {{dead_letter_notes}} where letter = old.id;
end;
