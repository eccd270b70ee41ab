drop table {{inbox}};
drop table {{inbox_seal}};
