drop table {{relay_workers}};
drop table {{relay_leases}};
