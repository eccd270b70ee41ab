-- A row is a message whose effects have committed with it.
create table {{inbox}} (
	consumer    text        collate "C" not null,
	message_id  text        collate "C" not null,
	received_at timestamptz not null default clock_timestamp(),
	primary key (consumer, message_id)
);

-- The seal: the database refuses to commit an id unless the last statement of the inbox
-- has sealed this transaction. The setting is local to the transaction and ends with it.
create function {{inbox_seal}}() returns trigger
language plpgsql
as $$
begin
	if current_setting('oncemill.inbox', true) is distinct from 'sealed ' || txid_current() then
		raise exception using
			errcode = 'OMI01',
			message = 'oncemill: a transaction of the inbox was ended by its handler',
			hint = 'Return from the handler instead. A handler that checks deferred constraints early must name them in set constraints.';
	end if;
	return null;
end
$$;

create constraint trigger {{name:inbox_seal}}
after insert on {{inbox}}
deferrable initially deferred
for each row execute function {{inbox_seal}}();
