alter table {{relay_leases}} drop column unsure_until;
