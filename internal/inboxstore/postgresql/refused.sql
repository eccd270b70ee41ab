-- name: count_refused
-- By primary key. The upsert locks its row, so concurrent counts are made one after the other.
insert into {{inbox_refused}} as r (consumer, topic, reason, refused, total)
values ($1, $2, $3, $4::bigint, $4::bigint)
on conflict (consumer, topic, reason) do update
set refused = excluded.refused + case when r.since < clock_timestamp() - $5::bigint * interval '1 microsecond' then 0 else r.refused end,
	since = case when r.since < clock_timestamp() - $5::bigint * interval '1 microsecond' then clock_timestamp() else r.since end,
	total = r.total + excluded.total,
	last_at = clock_timestamp()
returning refused
