-- crashes counts takeovers since a window was last confirmed. suspect is the message that
-- the worker had in flight alone.
alter table {{relay_leases}}
	add column suspect bigint,
	add column crashes integer not null default 0;

-- Messages that could not be published, and their successors. The first row of
-- a key has the time of its next attempt unless it is held; its successors have
-- none. An unkeyed row always has its own.
create table {{parked}} (
	lane       smallint    not null check (lane between 0 and 31),
	id         bigint      not null,
	topic      text        collate "C" not null,
	message_id text        not null,
	key        text        collate "C" not null,
	payload    bytea       not null,
	metadata   bytea       not null,
	created_at timestamptz not null,
	attempts   integer     not null default 0,
	next_at    timestamptz,
	crashed    boolean     not null default false,
	held       boolean     not null default false,
	parked_at  timestamptz not null default clock_timestamp(),
	errors     jsonb       not null default '[]', -- of the last ten attempts
	primary key (lane, id, message_id, created_at),
	check (not held or next_at is null)
);

create index {{name:parked_due}} on {{parked}} (lane, topic, next_at) where next_at is not null;
create index {{name:parked_key}} on {{parked}} (lane, key, id);
