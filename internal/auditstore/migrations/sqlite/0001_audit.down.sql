drop table {{audit}};
