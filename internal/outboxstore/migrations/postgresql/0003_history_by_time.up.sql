-- Serves the search by time. Rows come in the order of their times, so a summary
-- of each range of pages says enough, and costs the delivery of a message next to
-- nothing; an index for each way to search would cost it some 70 bytes of
-- write-ahead log a piece.
create index {{name:outbox_history_by_time}} on {{outbox_history}} using brin (relayed_at) with (pages_per_range = 32, autosummarize = on);
