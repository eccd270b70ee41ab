-- compatible: 3
-- Limits for all programs that write rows: those of Publish, and ids and times that a
-- relay can work with. Triggers, since SQLite adds no check to an existing table.
-- Existing rows of the outbox are not checked, since they leave soon.
create trigger {{name:outbox_limits}}
after insert on {{outbox}}
when not (
	new.id between 1 and 4611686018427387904
	and length(cast(new.topic as blob)) between 1 and 255
	and length(cast(new.message_id as blob)) between 1 and 255
	and length(cast(new.key as blob)) <= 255
	and length(cast(new.metadata as blob)) <= 65536
	and length(cast(new.payload as blob)) <= 134217728
	and typeof(new.created_at) = 'integer'
	and new.created_at between 0 and 253402300800000000
)
begin
	select raise(abort, 'oncemill: a row of the outbox breaks the limits of id, topic, message_id, key, metadata, payload or created_at');
end;

create trigger {{name:scheduled_limits}}
after insert on {{scheduled}}
when not (
	new.seq between 1 and 4611686018427387904
	and length(cast(new.topic as blob)) between 1 and 255
	and length(cast(new.message_id as blob)) between 1 and 255
	and length(cast(new.key as blob)) <= 255
	and length(cast(new.metadata as blob)) <= 65536
	and length(cast(new.payload as blob)) <= 134217728
	and typeof(new.deliver_at) = 'integer'
	and new.deliver_at between 0 and 253402300800000000
)
begin
	select raise(abort, 'oncemill: a scheduled row breaks the limits of seq, topic, message_id, key, metadata, payload or deliver_at');
end;

-- Scheduled rows are checked, since they become rows of the outbox later.
create table {{scheduled_fits}} (
	fits integer check (fits)
);

insert into {{scheduled_fits}} (fits)
select seq between 1 and 4611686018427387904
	and length(cast(topic as blob)) between 1 and 255
	and length(cast(message_id as blob)) between 1 and 255
	and length(cast(key as blob)) <= 255
	and length(cast(metadata as blob)) <= 65536
	and length(cast(payload as blob)) <= 134217728
	and typeof(deliver_at) = 'integer'
	and deliver_at between 0 and 253402300800000000
from {{scheduled}};

drop table {{scheduled_fits}};
