-- name: insert
-- One row; see statements.ForRows. Ids are given out in the order of the values, so rows
-- are ordered as in the call.
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
values ($1, $2, $3, $4, $5, $6);

-- name: schedule
-- One row; see statements.ForRows. $7 is 1 if $8, in microseconds, counts from now on. The
-- sequence is read in the order of the values, so messages of one call with the same due
-- time keep the call's order.
insert into {{scheduled}} (lane, topic, message_id, key, payload, metadata, deliver_at)
values ($1, $2, $3, $4, $5, $6, case $7::smallint when 1 then statement_timestamp() else timestamptz 'epoch' end + $8::bigint * interval '1 microsecond');

-- name: cancel
-- Returns one row for each canceled message. The migrations define the function, which
-- uses the index on message_id; its caller needs no right on the table.
select from {{scheduled_cancel}}($1);
