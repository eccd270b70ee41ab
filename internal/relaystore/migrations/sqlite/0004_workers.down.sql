alter table {{relay_workers}} drop column seen_at;
alter table {{relay_workers}} drop column problem;
alter table {{relay_workers}} drop column version;
alter table {{relay_workers}} drop column host;
