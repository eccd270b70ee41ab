-- name: record
-- One entry for each subject. Waits for nobody: the id and the time are assigned.
insert into {{audit}} (actor, reason, action, subject, details)
select $1, $2, $3, s.subject, $5
from unnest($4::text[]) as s (subject)

-- name: purge
-- index: audit_at, from its oldest end
-- Concurrent calls take different rows. statement_timestamp() can be used in an index
-- condition.
delete from {{audit}}
where id = any (array(
	select id
	from {{audit}}
	where at < statement_timestamp() - $1::bigint * interval '1 microsecond'
	order by at
	limit $2
	for update skip locked
))
