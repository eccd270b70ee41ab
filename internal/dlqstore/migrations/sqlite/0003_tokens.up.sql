-- compatible: 1
-- token: the replay of a consumer's letter carries it, so that nobody else can make one.
-- It is random, of the last replay, and kept when that ends: a late copy is recognised.
alter table {{dead_letters}} add column token text not null default '';

create trigger {{name:dead_letters_token}}
after update of state on {{dead_letters}}
when new.state = 'replaying' and old.state <> 'replaying' and new.source = 'consumer'
begin
	update {{dead_letters}} set token = lower(hex(randomblob(16))) where id = new.id;
end;

update {{dead_letters}}
set token = lower(hex(randomblob(16)))
where state = 'replaying' and source = 'consumer';
