drop table {{outbox_history}};
drop table {{outbox}};
