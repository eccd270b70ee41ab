-- name: seal
-- Inserts into idempotency_open, which has no index and nothing to search. The row
-- violates a deferred foreign key, so the database refuses a commit until finish deletes
-- it. Each transaction has its own row.
select {{idempotency_begin}}($1, $2)

-- name: finish
-- The seal's row is found by its ctid; the claim is served by the primary key. It
-- completes the claim as complete does, and deletes the seal's row only if that
-- succeeded. It waits for a takeover that runs, and returns false after it.
select {{idempotency_finish}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)

-- name: finish_group
-- As finish, once for each claim, in the order of the arguments. Returns the positions
-- of the claims that belong to other owners; if there are any, the seal stays.
select {{idempotency_finish_group}}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)

-- name: check
-- Reads no table. It fails in a transaction in which a statement has failed.
select 1
