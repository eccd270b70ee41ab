-- compatible: 2
-- unsure_until: what was created up to this time may have been sent, and no answer was recorded. It
-- stays when the lane is handed on: a row of parked may not be looked at for a long time.
alter table {{relay_leases}} add column unsure_until timestamptz;

update {{relay_leases}} set unsure_until = clock_timestamp() where crashes > 0 or suspect is not null;
