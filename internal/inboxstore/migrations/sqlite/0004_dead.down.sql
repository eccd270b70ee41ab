drop index {{name:inbox_received}};
create index {{name:inbox_received}} on {{inbox}} (consumer, received_at);
