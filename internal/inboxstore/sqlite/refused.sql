-- name: count_refused
-- By primary key. There is one writer.
insert into {{inbox_refused}} as r (consumer, topic, reason, refused, total)
values ($1, $2, $3, $4, $4)
on conflict (consumer, topic, reason) do update
set refused = excluded.refused + case when r.since < cast(unixepoch('subsec') * 1000000 as integer) - $5 then 0 else r.refused end,
	since = case when r.since < cast(unixepoch('subsec') * 1000000 as integer) - $5 then cast(unixepoch('subsec') * 1000000 as integer) else r.since end,
	total = r.total + excluded.total,
	last_at = cast(unixepoch('subsec') * 1000000 as integer)
returning refused
