-- compatible: 2
-- unavailable: deliveries for which something was unavailable. key, seq: the position of
-- the message, if sequences are enforced. again_at: it is not handled before, and later
-- messages of its key wait for it.
alter table {{inbox_failures}} add column unavailable integer not null default 0;
alter table {{inbox_failures}} add column key text not null default '';
alter table {{inbox_failures}} add column seq integer;
alter table {{inbox_failures}} add column again_at integer not null default 0;

create index {{name:inbox_failures_sequence}} on {{inbox_failures}} (consumer, key, seq) where seq is not null;

-- Messages that were refused for their signature or their encoding, which anybody can
-- send. refused counts from since on, and bounds how many become dead letters.
create table {{inbox_refused}} (
	consumer text    not null,
	topic    text    not null,
	reason   text    not null,
	refused  integer not null,
	total    integer not null,
	since    integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	last_at  integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	primary key (consumer, topic, reason)
) without rowid;
