-- compatible: 1
-- What a caller has running: claims that died are left out by their lease.
drop index {{idempotency_outstanding}};
create index {{name:idempotency_outstanding}} on {{idempotency}} (caller, lease_until) where completed_at is null;
