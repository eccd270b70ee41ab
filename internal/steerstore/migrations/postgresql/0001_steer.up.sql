-- What operators have paused: topics, sinks, lanes, keys and consumers. The rows outlive every
-- process. There are few: pause refuses more than 1,000.
create table {{pauses}} (
	kind   text        not null check (kind in ('topic', 'sink', 'lane', 'key', 'consumer')),
	name   text        collate "C" not null check (name <> '' and octet_length(name) <= 255),
	actor  text        not null check (actor <> '' and octet_length(actor) <= 5000),
	reason text        not null default '' check (octet_length(reason) <= 5000),
	since  timestamptz not null default clock_timestamp(),
	primary key (kind, name)
);

-- What operators want the owners of lanes to do, one row for each lane, until it is done.
create table {{lane_commands}} (
	id       bigint      generated always as identity primary key,
	action   text        not null check (action in ('release', 'retry')),
	lane     smallint    not null check (lane between 0 and 31),
	topic    text        collate "C" not null default '' check (octet_length(topic) <= 255),
	key      text        collate "C" not null default '' check (octet_length(key) <= 255),
	worker   text        not null default '',
	asked_at timestamptz not null default clock_timestamp(),
	unique (lane, action, topic, key)
);

-- Ends a pause. Who may execute it needs no right to delete, which would include the right to lock
-- the table against every worker. Served by the primary key; of two operators, one has ended it.
create function {{pauses_resume}}(text, text) returns setof text
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$ delete from {{pauses}} where kind = $1 and name = $2 returning name $$;

revoke all on function {{pauses_resume}}(text, text) from public;
