package outboxstore

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/shorttx"
)

// $1 are the lanes, $2 is the number of rows of each, $3 and $4 are the known rows, $5
// the busy keys, $6 the topics to leave out, $7 is the bytes of a lane (a row of more
// is left out), $8 are the topics to take, $9 the number of the newest rows of others,
// $10 the newest rows of each lane to choose from, $11 says that keys do not order
// rows, and $12 is the number of rows among which to look for earlier ones of their
// keys.
//
// The newest rows come from the primary keys (lane, id) of the ring's partitions,
// merged and backwards. Earlier rows of their keys are searched in one pass over the
// table: in lane order each row would be on another page. The numbered rows are narrow;
// payload and metadata are fetched for the chosen rows only, by their ids. Everything
// uses one snapshot, so the first unknown row of a key is its first row, if the pass
// has reached the end.
//
// Sub-selects and limits are as in postgresLaneRows.
const postgresReadAhead = `
with newest as materialized (
	select l.lane, l.turn, n.*
	from unnest($1::smallint[]) with ordinality as l (lane, turn)
	cross join lateral (
		select *
		from (
			select o.id, o.created_at, o.topic, o.key
			from {{outbox}} o
			where o.lane = l.lane
			order by o.id desc
			limit (select $10::bigint)
		) n
		limit $10
	) n
), known as materialized (
	select k.id, timestamptz 'epoch' + k.created_micros * interval '1 microsecond' as created_at
	from unnest((select $3::bigint[]), (select $4::bigint[])) as k (id, created_micros)
), fresh as materialized (
	select n.*, n.topic in (select unnest((select $8::text[]))) as wanted
	from newest n
	where case
		when (n.id, n.created_at) in (select k.id, k.created_at from known k) then false
		when n.key in (select unnest((select $5::text[]))) then false
		else n.topic not in (select unnest((select $6::text[])))
	end
), keys as materialized ( -- and one group of all keys that are not asked for, to count them
	select case when s.key in (select f.key from fresh f) then s.key end as key,
		min(s.id) filter (where case when (s.id, s.created_at) in (select k.id, k.created_at from known k) then false else true end) as first,
		count(*) as scanned
	from (
		select *
		from (
			select o.id, o.created_at, o.key
			from {{outbox}} o
			limit (select $12::bigint)
		) s
		limit $12
	) s
	group by 1
), chosen as materialized (
	select *
	from (
		select f.*, row_number() over (partition by f.lane, f.wanted order by case when f.wanted then f.id else -f.id end) as place
		from fresh f
		where $11::bool or f.key = '' or (f.key, f.id) in (
			select k.key, k.first
			from keys k
			where (select sum(k.scanned) from keys k) < $12
		)
	) f
	where f.place <= case when f.wanted then $2::bigint else $9::bigint end
)
select m.lane, int8send(m.id) || timestamptz_send(m.created_at) || tidsend(m.place), m.topic, m.message_id, m.key, false, m.payload, m.metadata, 0
from (
	select o.*, c.turn,
		sum(octet_length(o.payload) + octet_length(o.metadata))
			over (partition by c.lane order by c.wanted desc, o.id rows between unbounded preceding and 1 preceding) as bytes_before
	from chosen c
	cross join lateral (
		select o.ctid as place, o.*
		from {{outbox}} o
		where o.lane = c.lane and o.id = c.id and o.created_at = c.created_at
			and octet_length(o.payload) + octet_length(o.metadata) <= $7
		offset 0
	) o
) m
where coalesce(m.bytes_before, 0) < $7
order by m.turn, m.id`

// aheadLimit is how long the call may take: nobody waits for it, and others wait behind
// it.
const aheadLimit = 2 * time.Second

func (s *postgresStore) ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error) {
	req.Hollow = ahead.Not
	args := append(readArgs(req, req.Bytes), pq.Array(orEmpty(ahead.Topics)), ahead.Newest, ahead.Look, ahead.Unordered, ahead.Scan)
	var rows []Row
	err := shorttx.Run(ctx, s.db, shorttx.Limits{Lock: aheadLimit / 4, Statement: aheadLimit}, func(tx *sql.Tx) (err error) {
		rows, err = scanRows(tx.QueryContext(ctx, s.readAheadText, args...))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read ahead: %w", err)
	}
	return rows, nil
}
