drop index {{outbox_history_by_time}};
