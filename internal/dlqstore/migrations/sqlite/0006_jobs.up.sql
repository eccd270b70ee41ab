-- compatible: 1
-- Replay jobs. Each replays a set of dead letters that was frozen when it started: those of
-- ids, or those up to bound that filter selects, which are added batch by batch until
-- collected is set. The counts are of its rows in dead_letter_job_letters and add up to total.
-- Times are microseconds since 1970. due_at is when its next step is due. paced_at is when its last replays were requested. canary_from is how many
-- replays had ended when the current canary began.
create table {{dead_letter_jobs}} (
	id            integer primary key autoincrement,
	state         text    not null check (state in ('collecting', 'running', 'paused', 'canceling', 'canceled', 'finished')),
	actor         text    not null,
	reason        text    not null,
	filter        text    not null,
	bound         integer not null,
	canary        integer not null,
	rate          integer not null check (rate between 1 and 1000),
	stop_after    integer not null,
	created_at    integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	ended_at      integer,
	collected     integer not null default 0,
	part          integer not null default 0,
	after_died_at integer not null default 0,
	after_id      integer not null default 0,
	look_after    integer not null default 0,
	canary_passed integer not null default 0,
	canary_from   integer not null default 0,
	failed_before integer not null default 0,
	note          text    not null default '',
	waiting       text    not null default '',
	total         integer not null default 0,
	pending       integer not null default 0,
	asked         integer not null default 0,
	replayed      integer not null default 0,
	failed        integer not null default 0,
	discarded     integer not null default 0,
	taken         integer not null default 0,
	skipped       integer not null default 0,
	due_at        integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	paced_at      integer not null default (cast(unixepoch('subsec') * 1000000 as integer)),
	check (total = pending + asked + replayed + failed + discarded + taken + skipped),
	check ((ended_at is not null) = (state in ('canceled', 'finished')))
);

create index {{name:dead_letter_jobs_due}} on {{dead_letter_jobs}} (due_at, id) where ended_at is null and (state <> 'paused' or asked > 0);
create index {{name:dead_letter_jobs_ended}} on {{dead_letter_jobs}} (ended_at) where ended_at is not null;

-- The dead letters of a job. A pending one of a canceled job is not replayed. version is that
-- of the dead letter when the job requested its replay.
create table {{dead_letter_job_letters}} (
	job      integer not null,
	letter   integer not null,
	state    text    not null default 'pending' check (state in ('pending', 'asked', 'replayed', 'failed', 'discarded', 'taken')),
	version  integer not null default 0,
	asked_at integer,
	primary key (job, letter)
);

create index {{name:dead_letter_job_letters_pending}} on {{dead_letter_job_letters}} (job, letter) where state = 'pending';
create index {{name:dead_letter_job_letters_asked}} on {{dead_letter_job_letters}} (job, letter) where state = 'asked';
