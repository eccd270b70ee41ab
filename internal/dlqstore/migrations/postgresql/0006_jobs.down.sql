drop table {{dead_letter_job_letters}};
drop table {{dead_letter_jobs}};
