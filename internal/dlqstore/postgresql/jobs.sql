-- name: newest_letter
-- index: dead_letters_pkey, its end.
select coalesce(max(id), 0)
from {{dead_letters}}

-- name: start_job
-- Waits for nobody: the id and the times are assigned.
insert into {{dead_letter_jobs}} (state, actor, reason, filter, bound, canary, rate, stop_after)
values ('collecting', $1, $2, $3, $4, $5, $6, $7)
returning id

-- name: due_job
-- index: dead_letter_jobs_due, which is partial and holds the jobs in progress. Locks the job
-- until the transaction ends; other runners pass over it. A clock that was set back delays a
-- job by a minute at most.
select id, state, actor, reason, filter, bound, canary, rate, stop_after,
	(date_part('epoch', created_at) * 1000000)::bigint, (date_part('epoch', ended_at) * 1000000)::bigint,
	collected, part, after_died_at, after_id, look_after, canary_passed, canary_from, failed_before, note, waiting,
	total, pending, asked, replayed, failed, discarded, taken, skipped,
	(date_part('epoch', clock_timestamp() - paced_at) * 1000000)::bigint
from {{dead_letter_jobs}}
where ended_at is null
	and (state <> 'paused' or asked > 0)
	and (due_at <= statement_timestamp() or due_at > statement_timestamp() + interval '1 minute')
order by due_at, id
limit 1
for update skip locked

-- name: look_for_job
-- index: dead_letter_jobs_due; see due_job. Locks nothing.
select id
from {{dead_letter_jobs}}
where ended_at is null
	and (state <> 'paused' or asked > 0)
	and (due_at <= statement_timestamp() or due_at > statement_timestamp() + interval '1 minute')
order by due_at, id
limit 1

-- name: lock_job
-- By primary key. Waits for a runner's step, which is short.
select id, state, actor, reason, filter, bound, canary, rate, stop_after,
	(date_part('epoch', created_at) * 1000000)::bigint, (date_part('epoch', ended_at) * 1000000)::bigint,
	collected, part, after_died_at, after_id, look_after, canary_passed, canary_from, failed_before, note, waiting,
	total, pending, asked, replayed, failed, discarded, taken, skipped,
	(date_part('epoch', clock_timestamp() - paced_at) * 1000000)::bigint
from {{dead_letter_jobs}}
where id = $1
for update

-- name: get_job
-- By primary key.
select id, state, actor, reason, filter, bound, canary, rate, stop_after,
	(date_part('epoch', created_at) * 1000000)::bigint, (date_part('epoch', ended_at) * 1000000)::bigint,
	collected, part, after_died_at, after_id, look_after, canary_passed, canary_from, failed_before, note, waiting,
	total, pending, asked, replayed, failed, discarded, taken, skipped,
	(date_part('epoch', clock_timestamp() - paced_at) * 1000000)::bigint
from {{dead_letter_jobs}}
where id = $1

-- name: list_jobs
-- By primary key, from its end.
select id, state, actor, reason, filter, bound, canary, rate, stop_after,
	(date_part('epoch', created_at) * 1000000)::bigint, (date_part('epoch', ended_at) * 1000000)::bigint,
	collected, part, after_died_at, after_id, look_after, canary_passed, canary_from, failed_before, note, waiting,
	total, pending, asked, replayed, failed, discarded, taken, skipped,
	(date_part('epoch', clock_timestamp() - paced_at) * 1000000)::bigint
from {{dead_letter_jobs}}
where id > 0
order by id desc
limit $1

-- name: save_job
-- By primary key. The caller has locked the row.
update {{dead_letter_jobs}}
set state = $2, collected = $3, part = $4, after_died_at = $5, after_id = $6, look_after = $7,
	canary_passed = $8, failed_before = $9, note = $10, waiting = $11,
	total = $12, pending = $13, asked = $14, replayed = $15, failed = $16, discarded = $17, taken = $18, skipped = $19,
	due_at = clock_timestamp() + $20::bigint * interval '1 microsecond',
	paced_at = clock_timestamp() - $21::bigint * interval '1 microsecond',
	canary_from = $22,
	ended_at = case when $2 in ('canceled', 'finished') then clock_timestamp() end
where id = $1

-- name: postpone_job
-- By primary key. Waits for a step of another runner, which is short.
update {{dead_letter_jobs}}
set due_at = clock_timestamp() + $2::bigint * interval '1 microsecond', waiting = $3
where id = $1
	and ended_at is null

-- name: add_job_letters
-- By primary key of the dead letters. The caller has locked the job, so nobody else adds to it.
insert into {{dead_letter_job_letters}} (job, letter)
select $1, id
from {{dead_letters}}
where id = any ($2::bigint[])
	and state in ('dead', 'held')
on conflict do nothing

-- name: pending_job_letters
-- index: dead_letter_job_letters_pending, from its start.
select letter
from {{dead_letter_job_letters}}
where job = $1
	and state = 'pending'
order by letter
limit $2

-- name: open_letters
-- By primary key. Locks nothing.
select id
from {{dead_letters}}
where id = any ($1::bigint[])
	and state in ('dead', 'held')

-- name: replay_some
-- By primary key. As replay, but passes over those that somebody has locked.
update {{dead_letters}}
set state = 'replaying',
	acted_at = clock_timestamp(),
	acted_by = $2,
	acted_reason = $3
where id = any (array(
	select id
	from {{dead_letters}}
	where id = any ($1::bigint[])
		and state in ('dead', 'held')
	order by id
	limit $4
	for update skip locked
))
returning id

-- name: ask_job_letters
-- By primary key. The caller has locked the job and the dead letters.
update {{dead_letter_job_letters}} j
set state = 'asked', asked_at = clock_timestamp(), version = l.version
from {{dead_letters}} l
where j.job = $1
	and j.letter = any ($2::bigint[])
	and l.id = j.letter

-- name: end_job_letters
-- By primary key. The caller has locked the job.
update {{dead_letter_job_letters}}
set state = $3
where job = $1
	and letter = any ($2::bigint[])

-- name: job_outcomes
-- index: dead_letter_job_letters_asked, from a position; then the dead letters
-- by primary key, and by dead_letters_message the dead letter that a replay has become (see
-- failed_again), or that a refused message has left while its replay goes on for too long.
select j.letter, j.version, coalesce(l.state, ''), coalesce(l.version, 0), coalesce(l.source, ''), coalesce(l.consumer, ''),
	coalesce((date_part('epoch', clock_timestamp() - j.asked_at) * 1000000)::bigint, 0),
	coalesce(l.state = 'replayed' and l.source = 'consumer' and exists (
		select 1
		from {{dead_letters}} a
		where left(a.message_id, 255) = left(case when l.message_id = '' or l.reason = 'conflict' then 'letter-' || l.id else l.message_id end, 255)
			and a.message_id = case when l.message_id = '' or l.reason = 'conflict' then 'letter-' || l.id else l.message_id end
			and a.died_at >= l.acted_at
			and a.id <> l.id
			and a.source = 'consumer'
			and a.consumer = l.consumer
			and (a.reason not in ('conflict', 'unverified', 'malformed', 'older-than-retention')
				or a.reason = 'conflict' and a.payload = case when l.edited then l.edited_payload else l.payload end)
	), false),
	coalesce(l.state = 'replaying' and l.source = 'consumer' and l.message_id <> ''
		and j.asked_at < clock_timestamp() - $4::bigint * interval '1 microsecond' and exists (
		select 1
		from {{dead_letters}} a
		where left(a.message_id, 255) = left(l.message_id, 255)
			and a.message_id = l.message_id
			and a.died_at >= j.asked_at
			and a.id <> l.id
			and a.source = 'consumer'
			and a.consumer = l.consumer
			and a.reason in ('unverified', 'malformed')
	), false)
from {{dead_letter_job_letters}} j
left join {{dead_letters}} l on l.id = j.letter
where j.job = $1
	and j.state = 'asked'
	and j.letter > $2
order by j.letter
limit $3

-- name: relay_outcomes
-- By primary keys: whether a relay still has the message of a replay, and whether it has become
-- a dead letter again, by dead_letters_message. A relay writes a dead letter and removes the row
-- in one transaction, so this has to be one statement.
select l.id,
	exists (
		select 1
		from {{parked}} p
		where p.lane = l.lane
			and p.id = l.row_id
			and p.message_id = l.message_id
			and p.created_at = l.created_at
	),
	exists (
		select 1
		from {{dead_letters}} a
		where left(a.message_id, 255) = left(l.message_id, 255)
			and a.message_id = l.message_id
			and a.died_at >= l.acted_at
			and a.id <> l.id
			and a.source = 'relay'
			and a.lane = l.lane
			and a.row_id = l.row_id
	)
from {{dead_letters}} l
where l.id = any ($1::bigint[])

-- name: purge_job_letters
-- index: dead_letter_jobs_ended, its oldest end; then the primary key of the job's letters.
-- Concurrent calls may wait for each other's batch.
delete from {{dead_letter_job_letters}}
where job = (select id from {{dead_letter_jobs}} where ended_at < statement_timestamp() - $1::bigint * interval '1 microsecond' order by ended_at, id limit 1)
	and letter = any (array(
		select letter
		from {{dead_letter_job_letters}}
		where job = (select id from {{dead_letter_jobs}} where ended_at < statement_timestamp() - $1::bigint * interval '1 microsecond' order by ended_at, id limit 1)
		order by letter
		limit $2
	))

-- name: purge_job
-- index: dead_letter_jobs_ended, its oldest end. Only a job whose letters are purged.
delete from {{dead_letter_jobs}}
where id = (select id from {{dead_letter_jobs}} where ended_at < statement_timestamp() - $1::bigint * interval '1 microsecond' order by ended_at, id limit 1)
	and not exists (select 1 from {{dead_letter_job_letters}} l where l.job = {{dead_letter_jobs}}.id)
