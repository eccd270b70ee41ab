drop index {{parked_heads}};
alter table {{parked}} drop column unanswered;
