drop table {{inbox_refused}};
drop index {{inbox_failures_sequence}};
alter table {{inbox_failures}}
	drop column unavailable,
	drop column key,
	drop column seq,
	drop column again_at;
