drop index {{idempotency_outstanding}};
create index {{name:idempotency_outstanding}} on {{idempotency}} (caller) where completed_at is null;
