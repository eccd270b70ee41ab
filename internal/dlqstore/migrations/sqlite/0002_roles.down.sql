alter table {{dead_letters}} drop column maybe_delivered;
