-- On SQLite, step 1 creates the index that serves the search by time.
select 1;
