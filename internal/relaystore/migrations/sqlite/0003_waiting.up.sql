-- compatible: 2
-- Holds only heads: a worker that takes a lane reads its retrying keys from it, however
-- many rows wait behind them.
create index {{name:parked_heads}} on {{parked}} (lane, key) where next_at is not null or held;

-- An attempt had no answer: the message may have been delivered.
alter table {{parked}} add column unanswered integer not null default 0;
