drop table {{inbox_sequences}};
drop table {{inbox_failures}};
drop index {{name:inbox_received}};
alter table {{inbox}} drop column dead;
alter table {{inbox}} drop column fingerprint;
