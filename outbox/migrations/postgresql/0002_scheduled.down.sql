drop table {{scheduled}};
