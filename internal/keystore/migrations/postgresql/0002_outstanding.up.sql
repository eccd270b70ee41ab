-- compatible: 1
-- A caller's running keys: those of dead processes are excluded by their lease.
drop index {{idempotency_outstanding}};
create index {{name:idempotency_outstanding}} on {{idempotency}} (caller, lease_until) where completed_at is null;
