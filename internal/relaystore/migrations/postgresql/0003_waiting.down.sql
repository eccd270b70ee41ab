drop index {{parked_heads}};
alter table {{parked}} drop column unanswered;

alter table {{parked}} reset (vacuum_truncate, toast.vacuum_truncate);
