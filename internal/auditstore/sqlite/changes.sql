-- name: record
-- One entry for each subject. SQLite has one writer at a time: the transaction of the act.
insert into {{audit}} (actor, reason, action, subject, details)
select $1, $2, $3, value, $5
from json_each($4)

-- name: purge
-- index: audit_at, from its oldest end
-- One writer: see record.
delete from {{audit}}
where id in (
	select id
	from {{audit}}
	where at < cast(unixepoch('subsec') * 1000000 as integer) - $1
	order by at
	limit $2
)
