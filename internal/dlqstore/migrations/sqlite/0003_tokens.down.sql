drop trigger {{name:dead_letters_token}};
alter table {{dead_letters}} drop column token;
