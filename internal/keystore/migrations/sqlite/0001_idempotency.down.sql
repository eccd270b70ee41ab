drop table {{idempotency}};
drop table {{idempotency_body}};
drop table {{idempotency_seal}};
