drop table {{parked}};
alter table {{relay_leases}} drop column crashes;
alter table {{relay_leases}} drop column suspect;
