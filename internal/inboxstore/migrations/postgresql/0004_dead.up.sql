-- compatible: 2
-- The purge passes over no ids of dead letters, which stay.
drop index {{inbox_received}};
create index {{name:inbox_received}} on {{inbox}} (consumer, received_at) where not dead;
