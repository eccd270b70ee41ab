-- name: count_started
-- index: idempotency_outstanding, at most ?1 of its entries.
select endpoint, running, count(*), cast(unixepoch('subsec') * 1000000 as integer) - min(created_at)
from (
	select i.endpoint, i.lease_until > cast(unixepoch('subsec') * 1000000 as integer) as running, i.created_at
	from {{idempotency}} i
	where i.completed_at is null
	order by i.caller
	limit ?1
)
group by endpoint, running
order by endpoint, running;

-- name: count_stored
-- Along an index, at most ?1 of its entries.
select count(*)
from (select 1 from {{idempotency}} limit ?1);
