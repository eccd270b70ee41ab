-- name: insert
-- One row; see statements.ForRows. Ids are given out in the order of the values, so rows
-- are ordered as in the call.
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
values ($1, $2, $3, $4, $5, $6);

-- name: schedule
-- One row; see statements.ForRows. $7 is 1 if $8, in microseconds, counts from now on.
-- Numbers are given out in the order of the values.
insert into {{scheduled}} (lane, topic, message_id, key, payload, metadata, deliver_at)
values ($1, $2, $3, $4, $5, $6, case $7 when 1 then cast(unixepoch('subsec') * 1000000 as integer) else 0 end + $8);

-- name: cancel
-- By the index on message_id.
delete from {{scheduled}}
where message_id = ?1;
