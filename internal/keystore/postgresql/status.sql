-- name: count_started
-- index: idempotency_outstanding, at most $1 of its entries.
select s.endpoint, s.running, count(*), (extract(epoch from clock_timestamp() - min(s.created_at)) * 1000000)::bigint
from (
	select i.endpoint, i.lease_until > clock_timestamp() as running, i.created_at
	from {{idempotency}} i
	where i.completed_at is null
	order by i.caller
	limit $1
) s
group by s.endpoint, s.running
order by s.endpoint, s.running;

-- name: estimate
-- What the statistics of the server say about the rows.
select pg_stat_get_live_tuples('{{idempotency}}'::regclass);
