-- compatible: 2
-- Counts the held keys, however many messages are retrying.
create index {{name:parked_held}} on {{parked}} (lane) where held;
