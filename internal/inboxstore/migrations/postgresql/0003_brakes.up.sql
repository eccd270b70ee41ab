-- compatible: 2
-- unavailable: deliveries for which something was unavailable. key, seq: the position of
-- the message, if sequences are enforced. again_at: it is not handled before, and later
-- messages of its key wait for it.
alter table {{inbox_failures}}
	add column unavailable integer     not null default 0,
	add column key         text        collate "C" not null default '',
	add column seq         bigint,
	add column again_at    timestamptz not null default clock_timestamp();

create index {{name:inbox_failures_sequence}} on {{inbox_failures}} (consumer, key, seq) where seq is not null;

-- Messages that were refused for their signature or their encoding, which anybody can
-- send. refused counts from since on, and bounds how many become dead letters.
create table {{inbox_refused}} (
	consumer text        collate "C" not null,
	topic    text        collate "C" not null,
	reason   text        collate "C" not null,
	refused  bigint      not null,
	total    bigint      not null,
	since    timestamptz not null default clock_timestamp(),
	last_at  timestamptz not null default clock_timestamp(),
	primary key (consumer, topic, reason)
);
