-- A row is a message that the broker has not confirmed.
create sequence {{outbox_id}} as bigint cache 1;

create table {{outbox}} (
	lane       smallint    not null check (lane between 0 and 31),
	id         bigint      not null default nextval('{{outbox_id}}'),
	topic      text        not null,
	message_id text        not null,
	key        text        collate "C" not null default '',
	payload    bytea       not null,
	metadata   bytea       not null default '',
	created_at timestamptz not null default clock_timestamp()
) partition by list (((id >> 16) & 3));

alter sequence {{outbox_id}} owned by {{outbox}}.id;

-- The ring: 65,536 ids go into one partition, then into the next. A partition that is
-- empty and not being written is truncated. This removes dead rows and index entries
-- even while an old snapshot prevents vacuum from doing it.
create table {{outbox_0}} partition of {{outbox}} (primary key (lane, id)) for values in (0);
create table {{outbox_1}} partition of {{outbox}} (primary key (lane, id)) for values in (1);
create table {{outbox_2}} partition of {{outbox}} (primary key (lane, id)) for values in (2);
create table {{outbox_3}} partition of {{outbox}} (primary key (lane, id)) for values in (3);

-- Confirmed messages, one partition a day, created and dropped by the relay.
create table {{outbox_history}} (
	lane       smallint    not null,
	id         bigint      not null,
	topic      text        not null,
	message_id text        not null,
	key        text        collate "C" not null,
	payload    bytea       not null,
	metadata   bytea       not null,
	created_at timestamptz not null,
	relayed_at timestamptz not null
) partition by range (relayed_at);

create index {{name:outbox_history_by_id}} on {{outbox_history}} (id);
