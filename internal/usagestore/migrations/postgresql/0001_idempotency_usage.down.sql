drop table {{idempotency_usage}};
