drop trigger {{name:scheduled_types}};
drop trigger {{name:outbox_types}};
