-- compatible: 2
-- What was created up to then may have been sent, and no answer was recorded. It stays when the
-- lane is handed on: a row of parked may not be looked at for a long time.
alter table {{relay_leases}} add column unsure_until timestamptz;

update {{relay_leases}} set unsure_until = clock_timestamp() where crashes > 0 or suspect is not null;
