drop trigger {{name:dead_letter_notes_end}};
drop table {{dead_letter_notes}};
drop trigger {{name:dead_letters_token}};

-- An edited replay has not ended: its message would become the original.
update {{dead_letters}}
set state = 'dead'
where state = 'replaying' and edited;

drop index {{name:dead_letters_origin}};
alter table {{dead_letters}} drop column edited;
alter table {{dead_letters}} drop column edit_token;
alter table {{dead_letters}} drop column edited_payload;
alter table {{dead_letters}} drop column edited_metadata;
alter table {{dead_letters}} drop column edited_at;
alter table {{dead_letters}} drop column edited_by;
alter table {{dead_letters}} drop column edited_reason;
alter table {{dead_letters}} drop column origin;

create trigger {{name:dead_letters_token}}
after update of state on {{dead_letters}}
when new.state = 'replaying' and old.state <> 'replaying' and new.source = 'consumer'
begin
	update {{dead_letters}} set token = lower(hex(randomblob(16))) where id = new.id;
end;
