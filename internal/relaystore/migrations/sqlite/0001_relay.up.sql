-- A lane is worked by one owner at a time. The epoch grows with each change of
-- owner; a write that must not come from a former owner names owner and epoch.
-- Lane -1 is the upkeep of the tables. Times are microseconds since 1970.
create table {{relay_leases}} (
	lane        integer primary key check (lane between -1 and 31),
	owner       text    not null default '',
	epoch       integer not null default 0,
	lease_until integer not null default (cast(unixepoch('subsec') * 1000000 as integer))
);

insert into {{relay_leases}} (lane)
with recursive l (lane) as (select -1 union all select lane + 1 from l where lane < 31)
select lane from l;

-- One row for each running worker process.
create table {{relay_workers}} (
	owner      text    primary key,
	name       text    not null,
	started_at integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	seen_until integer not null,
	ready      integer not null,
	stopping   integer not null
);
