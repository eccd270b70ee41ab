drop table {{inbox}};
drop function {{inbox_seal}}();
