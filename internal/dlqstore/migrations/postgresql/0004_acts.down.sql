drop table {{dead_letter_notes}};

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

-- An edited replay has not ended: its message would become the original.
update {{dead_letters}}
set state = 'dead'
where state = 'replaying' and edited;

drop index {{dead_letters_origin}};

alter table {{dead_letters}}
	drop constraint {{name:dead_letters_edited}},
	drop column edited,
	drop column edit_token,
	drop column edited_payload,
	drop column edited_metadata,
	drop column edited_at,
	drop column edited_by,
	drop column edited_reason,
	drop column origin;
