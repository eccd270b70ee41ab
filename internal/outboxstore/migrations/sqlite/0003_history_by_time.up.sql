-- SQLite has the index that serves the search by time since step 1.
select 1;
