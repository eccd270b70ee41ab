-- A lane is worked by one owner at a time. The epoch grows with each change of
-- owner; a write that must not come from a former owner names owner and epoch.
-- Lane -1 is the upkeep of the tables.
create table {{relay_leases}} (
	lane        smallint    primary key check (lane between -1 and 31),
	owner       text        not null default '',
	epoch       bigint      not null default 0,
	lease_until timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

insert into {{relay_leases}} (lane) select generate_series(-1, 31);

-- One row for each running worker process.
create table {{relay_workers}} (
	owner      text        primary key,
	name       text        not null,
	started_at timestamptz not null default clock_timestamp(),
	seen_until timestamptz not null,
	ready      boolean     not null,
	stopping   boolean     not null
) with (fillfactor = 50);
