-- name: newest_by_time, reversed oldest_by_time
-- index: audit_at, in its order. The other conditions filter its rows.
select id, at, db_role, actor, reason, action, subject, details
from {{audit}}
where ($2 = '' or actor = $2)
	and ($3 = '' or action = $3)
	and ($4 = '' or subject = $4)
	and at >= $5
	and at < $6
	and (at, id) {{<}} ($7, $8)
order by at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_actor, reversed oldest_by_actor
-- index: audit_actor, in its order. The other conditions filter its rows.
select id, at, db_role, actor, reason, action, subject, details
from {{audit}}
where actor = $2
	and ($3 = '' or action = $3)
	and ($4 = '' or subject = $4)
	and at >= $5
	and at < $6
	and (at, id) {{<}} ($7, $8)
order by at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_action, reversed oldest_by_action
-- index: audit_action, in its order. The other conditions filter its rows.
select id, at, db_role, actor, reason, action, subject, details
from {{audit}}
where action = $3
	and ($2 = '' or actor = $2)
	and ($4 = '' or subject = $4)
	and at >= $5
	and at < $6
	and (at, id) {{<}} ($7, $8)
order by at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_subject, reversed oldest_by_subject
-- index: audit_subject, in its order. The other conditions filter its rows.
select id, at, db_role, actor, reason, action, subject, details
from {{audit}}
where subject = $4
	and ($2 = '' or actor = $2)
	and ($3 = '' or action = $3)
	and at >= $5
	and at < $6
	and (at, id) {{<}} ($7, $8)
order by at {{desc}}, id {{desc}}
limit $1
