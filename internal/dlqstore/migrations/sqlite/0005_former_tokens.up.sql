-- compatible: 1
-- former_tokens: those of earlier replays, the last ones first, 32 characters each. A replay
-- that was discarded may still be in a queue when the dead letter is restored and replayed
-- again. Its message is recognized by its token, and is no message for anybody.
alter table {{dead_letters}} add column former_tokens text not null default '';

drop trigger {{name:dead_letters_token}};
create trigger {{name:dead_letters_token}}
after update of state on {{dead_letters}}
when new.state = 'replaying' and old.state <> 'replaying' and new.source = 'consumer'
begin
	update {{dead_letters}}
	set token = case when new.edited then '' else lower(hex(randomblob(16))) end,
		edit_token = case when new.edited then lower(hex(randomblob(16))) else '' end,
		former_tokens = substr(old.token || old.edit_token || old.former_tokens, 1, 3200)
	where id = new.id;
end;
