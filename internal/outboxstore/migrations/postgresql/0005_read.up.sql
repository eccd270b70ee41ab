-- compatible: 4
-- Reads each lane from its start, in the order of ids, up to a number of rows. It passes
-- over the known rows (their ids ascend, and their times are microseconds since 1970) and
-- the busy keys. Rows of the hollow topics come without payload and metadata.
--
-- A function, so that a session plans it once: planning took three times as long as the
-- read of an outbox that is nearly empty. The plan is right whatever the table is like
-- then or later, because the function permits only this one: a scan of each lane by the
-- primary keys (lane, id) of the partitions, merged, that stops after that many rows.
--
-- The snapshot is the calling statement's, so every row that was committed before is
-- seen. Among the rows of one key, whose producers serialize, a visible row implies that
-- every earlier one is visible or gone.
--
-- Returns one row for each lane: a protocol message for each row of the outbox cost both
-- sides twice as much. Numbers have a fixed width, the texts hold no NUL, and the
-- lengths of the rest are among the numbers: -1 and 0 for a hollow row. Functions of
-- binary output need no parsing and give the same bytes through every driver.
--
-- Rows with more bytes than their share of the lane come without payload and metadata, so
-- no running sum is needed.
--
-- The known rows are looked up by bisection (width_bucket: where the id would stand): a
-- hashed subplan is built for each partition, which took longer than the read of as many
-- rows. The arrays are concatenated with an empty one, because PL/pgSQL keeps its own in a
-- form that each lookup would have to copy.
create function {{outbox_read}}(
	lanes smallint[], most bigint, known_ids bigint[], known_times bigint[], busy text[], hollow text[], share bigint
) returns table (
	lane smallint, numbers bytea, topics bytea, message_ids bytea, keys bytea, payloads bytea, metadata bytea
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set work_mem = '64MB' -- what comes is at most 32 MiB, and not to be written to a file
as $$
#variable_conflict use_column
begin
	return query
	select l.lane, m.*
	from unnest(lanes) as l (lane)
	cross join lateral (
		select
			string_agg(int8send(f.id) || timestamptz_send(f.created_at) || tidsend(f.place)
				|| int4send(coalesce(octet_length(f.payload), -1)) || int4send(coalesce(octet_length(f.metadata), 0)), ''),
			string_agg(textsend(f.topic), '\x00'),
			string_agg(textsend(f.message_id), '\x00'),
			string_agg(textsend(f.key), '\x00'),
			string_agg(case when octet_length(f.payload) + octet_length(f.metadata) <= share then f.payload end, ''),
			string_agg(case when octet_length(f.payload) + octet_length(f.metadata) <= share then f.metadata end, '')
		from (
			select o.ctid as place, o.id, o.topic, o.message_id, o.key, o.created_at,
				case when o.topic not in (select unnest(hollow)) then o.payload end as payload,
				case when o.topic not in (select unnest(hollow)) then o.metadata end as metadata
			from {{outbox}} o
			where o.lane = l.lane
				and case
					when (select known_ids || '{}')[width_bucket(o.id, (select known_ids || '{}'))] = o.id
						and o.created_at = timestamptz 'epoch'
							+ (select known_times || '{}')[width_bucket(o.id, (select known_ids || '{}'))] * interval '1 microsecond'
					then false
					else o.key not in (select unnest(busy))
				end
			order by o.id
			limit most
		) f
	) m;
end
$$;
