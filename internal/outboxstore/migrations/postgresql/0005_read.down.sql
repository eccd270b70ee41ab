drop function {{outbox_read}}(smallint[], bigint, bigint[], bigint[], text[], text[], bigint);
