drop table {{inbox_refused}};
drop index {{name:inbox_failures_sequence}};
alter table {{inbox_failures}} drop column unavailable;
alter table {{inbox_failures}} drop column key;
alter table {{inbox_failures}} drop column seq;
alter table {{inbox_failures}} drop column again_at;
