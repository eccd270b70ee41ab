drop trigger {{name:dead_letters_token}};
alter table {{dead_letters}} drop column former_tokens;

create trigger {{name:dead_letters_token}}
after update of state on {{dead_letters}}
when new.state = 'replaying' and old.state <> 'replaying' and new.source = 'consumer'
begin
	update {{dead_letters}}
	set token = case when new.edited then '' else lower(hex(randomblob(16))) end,
		edit_token = case when new.edited then lower(hex(randomblob(16))) else '' end
	where id = new.id;
end;
