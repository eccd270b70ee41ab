-- compatible: 1
-- Replay jobs. Each replays a set of dead letters that was frozen when it started: those of
-- ids, or those up to bound that filter selects, which are added batch by batch until
-- collected is set. The counts are of its rows in dead_letter_job_letters and add up to total.
-- due_at is when its next step is due. paced_at is when its last replays were requested. canary_from is how many
-- replays had ended when the current canary began.
create table {{dead_letter_jobs}} (
	id            bigint      generated always as identity primary key,
	state         text        not null check (state in ('collecting', 'running', 'paused', 'canceling', 'canceled', 'finished')),
	actor         text        not null check (octet_length(actor) <= 5000),
	reason        text        not null check (octet_length(reason) <= 5000),
	filter        text        not null check (octet_length(filter) <= 100000),
	bound         bigint      not null,
	canary        integer     not null,
	rate          integer     not null check (rate between 1 and 1000),
	stop_after    integer     not null,
	created_at    timestamptz not null default clock_timestamp(),
	ended_at      timestamptz,
	collected     boolean     not null default false,
	part          smallint    not null default 0,
	after_died_at bigint      not null default 0,
	after_id      bigint      not null default 0,
	look_after    bigint      not null default 0,
	canary_passed boolean     not null default false,
	canary_from   bigint      not null default 0,
	failed_before bigint      not null default 0,
	note          text        not null default '',
	waiting       text        not null default '',
	total         bigint      not null default 0,
	pending       bigint      not null default 0,
	asked         bigint      not null default 0,
	replayed      bigint      not null default 0,
	failed        bigint      not null default 0,
	discarded     bigint      not null default 0,
	taken         bigint      not null default 0,
	skipped       bigint      not null default 0,
	due_at        timestamptz not null default clock_timestamp(),
	paced_at      timestamptz not null default clock_timestamp(),
	check (total = pending + asked + replayed + failed + discarded + taken + skipped),
	check ((ended_at is not null) = (state in ('canceled', 'finished'))),
	-- Runners read what roles with fewer rights write.
	check (part between 0 and 1000 and after_died_at between 0 and 253402300799999999
		and octet_length(note) <= 10000 and octet_length(waiting) <= 10000
		and least(pending, asked, replayed, failed, discarded, taken, skipped) >= 0
		and due_at between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00'
		and paced_at between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00'
		and coalesce(ended_at, due_at) between '1970-01-01 00:00:00+00' and '10000-01-01 00:00:00+00')
);

create index {{name:dead_letter_jobs_due}} on {{dead_letter_jobs}} (due_at, id) where ended_at is null and (state <> 'paused' or asked > 0);
create index {{name:dead_letter_jobs_ended}} on {{dead_letter_jobs}} (ended_at) where ended_at is not null;

-- The dead letters of a job. A pending one of a canceled job is not replayed. version is that
-- of the dead letter when the job requested its replay.
create table {{dead_letter_job_letters}} (
	job      bigint      not null,
	letter   bigint      not null,
	state    text        not null default 'pending' check (state in ('pending', 'asked', 'replayed', 'failed', 'discarded', 'taken')),
	version  integer     not null default 0,
	asked_at timestamptz,
	primary key (job, letter)
);

create index {{name:dead_letter_job_letters_pending}} on {{dead_letter_job_letters}} (job, letter) where state = 'pending';
create index {{name:dead_letter_job_letters_asked}} on {{dead_letter_job_letters}} (job, letter) where state = 'asked';
