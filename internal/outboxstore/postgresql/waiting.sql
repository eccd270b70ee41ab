-- name: list_waiting
-- By the primary keys (lane, id), merged, from $3 on: at most $2 rows of each of the lanes $1 are
-- looked at, so the cost does not grow with the backlog. With $8, contents of messages are not read.
select
	w.lane, w.id, w.topic, w.message_id, w.key,
	case when $8::boolean then '' else w.payload end, case when $8::boolean then '' else w.metadata end, octet_length(w.payload),
	(date_part('epoch', w.created_at) * 1000000)::bigint
from unnest($1::smallint[]) as l (lane)
cross join lateral (
	select *
	from {{outbox}} o
	where o.lane = l.lane and o.id > $3::bigint
	order by o.id
	limit $2
) w
where ($4::bigint = 0 or w.id = $4::bigint)
	and ($5::text = '' or w.topic = $5::text)
	and ($6::text = '' or w.key = $6::text)
	and ($7::text = '' or w.message_id = $7::text)
order by w.id, w.lane
limit $9;
