-- name: list_waiting
-- By the primary key, from ?3 on: at most ?2 rows are looked at, so the cost does not grow with the
-- backlog. With ?8, contents of messages are not read.
select
	w.lane, w.id, w.topic, w.message_id, w.key,
	case when ?8 then x'' else w.payload end, case when ?8 then x'' else w.metadata end, octet_length(w.payload), w.created_at
from (
	select *
	from {{outbox}} o
	where o.id > ?3
	order by o.id
	limit ?2
) w
where w.lane in (select value from json_each(?1))
	and (?4 = 0 or w.id = ?4)
	and (?5 = '' or w.topic = ?5)
	and (?6 = '' or w.key = ?6)
	and (?7 = '' or w.message_id = ?7)
order by w.id
limit ?9;
