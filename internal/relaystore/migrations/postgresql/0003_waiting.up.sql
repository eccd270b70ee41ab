-- compatible: 2
-- Holds only heads: a worker that takes a lane reads its retrying keys from it, however
-- many rows wait behind them.
create index {{name:parked_heads}} on {{parked}} (lane, key) where next_at is not null or held;

-- An attempt had no answer: the message may have been delivered.
alter table {{parked}} add column unanswered boolean not null default false;

-- Vacuum truncates a table under a lock that a standby replays.
alter table {{parked}} set (vacuum_truncate = off, toast.vacuum_truncate = off);
