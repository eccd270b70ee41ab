-- name: newest_by_time, reversed oldest_by_time
-- index: audit_at, in its order. The other conditions filter its rows.
select id, (date_part('epoch', at) * 1000000)::bigint, db_role, actor, reason, action, subject, details
from {{audit}}
where ($2::text = '' or actor = $2::text)
	and ($3::text = '' or action = $3::text)
	and ($4::text = '' or subject = $4::text)
	and at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond'
	and at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond'
	and (at, id) {{<}} (timestamptz 'epoch' + $7::bigint * interval '1 microsecond', $8::bigint)
order by at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_actor, reversed oldest_by_actor
-- index: audit_actor, in its order. The index holds a prefix of long texts.
-- The other conditions filter its rows.
select id, (date_part('epoch', at) * 1000000)::bigint, db_role, actor, reason, action, subject, details
from {{audit}}
where left(actor, 255) = left($2::text, 255)
	and actor = $2::text
	and ($3::text = '' or action = $3::text)
	and ($4::text = '' or subject = $4::text)
	and at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond'
	and at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond'
	and (at, id) {{<}} (timestamptz 'epoch' + $7::bigint * interval '1 microsecond', $8::bigint)
order by at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_action, reversed oldest_by_action
-- index: audit_action, in its order. The other conditions filter its rows.
select id, (date_part('epoch', at) * 1000000)::bigint, db_role, actor, reason, action, subject, details
from {{audit}}
where action = $3::text
	and ($2::text = '' or actor = $2::text)
	and ($4::text = '' or subject = $4::text)
	and at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond'
	and at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond'
	and (at, id) {{<}} (timestamptz 'epoch' + $7::bigint * interval '1 microsecond', $8::bigint)
order by at {{desc}}, id {{desc}}
limit $1

-- name: newest_by_subject, reversed oldest_by_subject
-- index: audit_subject, in its order. The index holds a prefix of long texts.
-- The other conditions filter its rows.
select id, (date_part('epoch', at) * 1000000)::bigint, db_role, actor, reason, action, subject, details
from {{audit}}
where left(subject, 255) = left($4::text, 255)
	and subject = $4::text
	and ($2::text = '' or actor = $2::text)
	and ($3::text = '' or action = $3::text)
	and at >= timestamptz 'epoch' + $5::bigint * interval '1 microsecond'
	and at < timestamptz 'epoch' + $6::bigint * interval '1 microsecond'
	and (at, id) {{<}} (timestamptz 'epoch' + $7::bigint * interval '1 microsecond', $8::bigint)
order by at {{desc}}, id {{desc}}
limit $1
