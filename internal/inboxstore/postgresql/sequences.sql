-- name: advance
-- By primary key. The upsert locks the row of the key, or waits for the transaction that holds
-- the lock. So at most one message of a key is between here and its commit, in any
-- process. last_sequence, which follows, sees the values that decided this one, since
-- nobody changes a locked row.
insert into {{inbox_sequences}} as s (consumer, key, seq)
values ($1, $2, $3)
on conflict (consumer, key) do update
set seq = excluded.seq
where case
		when s.seq >= excluded.seq then false -- and no difference below overflows
		else $4 or s.seq = excluded.seq - 1
	end
returning seq

-- name: last_sequence
-- By primary key. See advance.
select seq
from {{inbox_sequences}}
where consumer = $1
	and key = $2

-- name: retried
-- index: inbox_failures_sequence
-- The key's sequence is locked by this transaction, so none of its messages is handled
-- meanwhile.
select exists (
	select 1
	from {{inbox_failures}} f
	where f.consumer = $1
		and f.key = $2
		and f.seq < $3
		and f.seq > (select s.seq from {{inbox_sequences}} s where s.consumer = $1 and s.key = $2)
		and f.again_at > statement_timestamp() - $4::bigint * interval '1 microsecond'
)
