-- Serves the search by time. Rows are inserted in the order of their times, so a BRIN
-- index is enough, and costs a delivery almost nothing. Each B-tree would cost some 70
-- bytes of write-ahead log per message.
create index {{name:outbox_history_by_time}} on {{outbox_history}} using brin (relayed_at) with (pages_per_range = 32, autosummarize = on);
