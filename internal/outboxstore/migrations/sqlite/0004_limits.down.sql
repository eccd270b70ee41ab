drop trigger {{name:scheduled_limits}};
drop trigger {{name:outbox_limits}};
