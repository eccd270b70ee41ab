drop table {{inbox_sequences}};
drop table {{inbox_failures}};
drop index {{inbox_received}};
alter table {{inbox}}
	drop column dead,
	drop column fingerprint;
