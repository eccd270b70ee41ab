package relay

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/shorttx"
)

// Reads and their plans are like the reads of the outbox. Each is planned at its
// execution. Arrays and inner limits are behind sub-selects, so that the planner uses
// an index in its order, whatever its statistics of the table.
const (
	// Served by the partial index on (lane, key) of heads: the rows behind them cost
	// nothing.
	postgresParkedKeys = `
select p.lane, p.key
from {{parked}} p
where p.lane = any ((select $1::smallint[])::smallint[])
	and p.key > ''
	and (p.next_at is not null or p.held)`

	// Heads by the partial index (lane, topic, next_at), which holds only heads: it
	// jumps from each topic to the next, at most $3 times in a lane, from the topic
	// after $2 on. The condition that all lanes are between 0 and 31 makes the planner
	// expect few rows of the recursion; otherwise it would compile.
	postgresParkedTopics = `
with recursive t (lane, topic, next_at, place) as (
	select l.lane, m.topic, m.next_at, 1
	from unnest((select $1::smallint[])) as l (lane)
	cross join lateral (
		select p.topic, p.next_at
		from {{parked}} p
		where p.lane = l.lane and p.next_at is not null and p.topic > $2
		order by p.topic, p.next_at
		limit 1
	) m
	union all
	select t.lane, m.topic, m.next_at, t.place + 1
	from t
	cross join lateral (
		select p.topic, p.next_at
		from {{parked}} p
		where p.lane = t.lane and p.next_at is not null and p.topic > t.topic
		order by p.topic, p.next_at
		limit 1
	) m
	where t.place < $3
)
select t.lane, t.topic, ceil(date_part('epoch', t.next_at - statement_timestamp()) * 1000000)::bigint, t.place
from t
where t.lane between 0 and 31`

	// Of the lanes $1 and their topics $6: the due heads and the first one that is not
	// due, by the same index, and the rows of their keys by (lane, key, id). $2 and $7
	// are the rows to pass over, $3 the number of heads plus one, which shows that
	// there are more, $4 the rows of a key, $5 their bytes, $8 the bytes of all, of
	// which a row takes rowBytes besides its own. A payload of more than $9 bytes is
	// not returned, and keys are passed over whose head has more than $11. An unkeyed
	// row is alone. Topics take turns, so that none waits for the backlog of another
	// one.
	postgresDue = `
with known as materialized (
	select k.id, timestamptz 'epoch' + k.created * interval '1 microsecond' as created_at
	from unnest((select $2::bigint[]), (select $7::bigint[])) as k (id, created)
)
select wait, lane, id, topic, message_id, key, case when missing = 0 then payload end, metadata, created_micros,
	attempts, tried, crashed, unanswered, held, age, place, missing, tid
from (
select h.wait, h.place, r.*,
	sum(r.bytes) over (order by h.place, r.id rows between unbounded preceding and 1 preceding) as all_before
from (
	select m.lane, m.id, m.key,
		ceil(date_part('epoch', m.next_at - statement_timestamp()) * 1000000)::bigint as wait,
		row_number() over (order by case when m.next_at <= statement_timestamp() then m.turn end, m.next_at, m.id) as place
	from (
		select m.*, row_number() over (partition by w.topic order by m.next_at, m.id) as turn
		from unnest((select $1::smallint[]), (select $6::text[])) as w (lane, topic)
		cross join lateral (
			select *
			from (
				select p.lane, p.id, p.key, p.next_at
				from {{parked}} p
				where p.lane = w.lane
					and p.topic = w.topic
					and p.next_at is not null
					and (p.id, p.created_at) not in (select k.id, k.created_at from known k)
					and octet_length(p.payload) <= (select $11::bigint)
				order by p.next_at
				limit (select $3::bigint)
			) n
			limit $3
		) m
	) m
	order by case when m.next_at <= statement_timestamp() then m.turn end, m.next_at, m.id
	limit $3
) h
left join lateral (
	select *
	from (
		select f.*,
			(date_part('epoch', f.created_at) * 1000000)::bigint as created_micros,
			(date_part('epoch', clock_timestamp() - f.parked_at) * 1000000)::bigint as age,
			jsonb_array_length(f.errors) > 0 as tried, tidsend(f.at) as tid,
			case when octet_length(f.payload) > $9 then octet_length(f.payload) else 0 end as missing,
			octet_length(f.metadata) + case when octet_length(f.payload) > $9 then 0 else octet_length(f.payload) end + (select $10::bigint) as bytes,
			sum(octet_length(f.payload) + octet_length(f.metadata))
				over (rows between unbounded preceding and 1 preceding) as bytes_before
		from (
			select p.*, p.ctid as at
			from {{parked}} p
			where p.lane = h.lane
				and p.key = h.key
				and p.id >= h.id
				and (p.held or (p.id, p.created_at) not in (select k.id, k.created_at from known k))
			order by p.id
			limit case when h.key = '' then 1 else (select $4::bigint) end
		) f
	) w
	where coalesce(w.bytes_before, 0) < $5
) r on h.wait <= 0 and h.place < $3
) x
where coalesce(all_before, 0) < $8 or id is null
order by place, id`

	postgresParkedPiece = `
select substring(p.payload from $5 for $6)
from {{parked}} p
where p.lane = $1 and p.id = $2 and p.message_id = $3 and p.created_at = timestamptz 'epoch' + $4 * interval '1 microsecond'
	and p.ctid = $7::tid`

	// By the primary keys; of the ring one partition.
	postgresFind = `
select p.lane, p.id, p.topic, p.message_id, p.key,
	(date_part('epoch', p.created_at) * 1000000)::bigint, p.attempts, jsonb_array_length(p.errors) > 0, p.crashed, p.unanswered,
	(date_part('epoch', clock_timestamp() - p.parked_at) * 1000000)::bigint, true
from {{parked}} p
where p.lane = $1 and p.id = $2
union all
select o.lane, o.id, o.topic, o.message_id, o.key,
	(date_part('epoch', o.created_at) * 1000000)::bigint, 0, false, false, false, 0, false
from {{outbox}} o
where o.lane = $1 and o.id = $2 and ((o.id >> 16) & 3) = (($2::bigint >> 16) & 3)
limit 1`

	// By the partial index of commands. The oldest message first, whichever command was
	// given first: if a key is replayed as a whole, its messages keep their order.
	postgresCommands = `
select m.id, m.lane, m.key
from unnest((select $1::smallint[])) as l (lane)
cross join lateral (
	select *
	from (
		select d.id, d.lane, d.key, d.row_id
		from {{dead_letters}} d
		where d.lane = l.lane and d.source = 'relay' and d.state in ('replaying', 'discarding')
		order by d.row_id, d.id
		limit (select $2::bigint)
	) c
	limit $2
) m
order by m.row_id, m.id
limit $2`

	// By the primary key of each partition, backwards: rows beyond come last. It ends
	// at the first matching row of a lane.
	postgresBeyond = `
select m.lane, m.id
from unnest((select $1::smallint[])) as l (lane)
cross join lateral (
	select n.lane, n.id
	from (
		select o.lane, o.id, o.topic
		from {{outbox}} o
		where o.lane = l.lane
		order by o.id desc
		limit (select $3::bigint)
	) n
	where n.topic not in (select unnest((select $2::text[])))
	limit 1
) m`

	// By primary key, and by (lane, key, id).
	postgresLetterKeys = `
select k.lane, k.key, (select true from {{parked}} p where p.lane = k.lane and p.key = k.key limit 1) is not null
from (
	select distinct d.lane, d.key
	from {{dead_letters}} d
	where d.id = any ($1::bigint[]) and d.source = 'relay' and d.key <> ''
) k`
)

// read runs fn within limits, like writes. A lock that somebody holds on the table must
// produce an answer, so that it is not taken for a dead connection.
func (s *postgresParking) read(ctx context.Context, fn func(tx *sql.Tx) error) error {
	return shorttx.Run(ctx, s.db, shorttx.Within(ctx), fn)
}

func (s *postgresParking) parkedKeys(ctx context.Context, lanes []int) ([]parkedKey, error) {
	var keys []parkedKey
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		keys, err = scanKeys(tx.QueryContext(ctx, s.keysText, smallints(lanes)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read parked keys: %w", err)
	}
	return unique(keys), nil
}

func (s *postgresParking) look(ctx context.Context, r dueRequest) (found looked, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		topics, err := scanTopics(tx.QueryContext(ctx, s.topicsText, smallints(r.lanes), r.after, r.most))
		if err != nil {
			return fmt.Errorf("read topics of parked: %w", err)
		}
		due, chosen := r.choose(topics)
		found = chosen
		if len(due) == 0 {
			return nil
		}
		lanes, names := make([]int, len(due)), make([]string, len(due))
		for i, t := range due {
			lanes[i], names[i] = t.lane, t.topic
		}
		ids, created := knownArrays(r.known)
		rows, next, err := scanDue(tx.QueryContext(ctx, s.dueText,
			smallints(lanes), ids, r.heads+1, r.rows, parkedBytes, pq.Array(names), created, r.bytes, r.mostInline(), rowBytes, r.mostHead()))
		if err != nil {
			return fmt.Errorf("read what is due of parked: %w", err)
		}
		found.rows = rows
		found.sooner(next)
		return nil
	})
	if err != nil {
		return looked{}, err
	}
	return found, nil
}

func (s *postgresParking) piece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
	return scanPiece(s.db.QueryRowContext(ctx, s.pieceText, refArgs(of, offset+1, most, of.CTID.String())...))
}

func (s *postgresParking) beyond(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error) {
	found, err := scanLanes(s.db.QueryContext(ctx, s.beyondText, smallints(lanes), pq.Array(topics), rows))
	if err != nil {
		return nil, fmt.Errorf("look for other topics: %w", err)
	}
	return found, nil
}

func (s *postgresParking) find(ctx context.Context, lane int, id int64) (row parkedRow, parked, found bool, err error) {
	row, parked, found, err = scanFound(s.db.QueryRowContext(ctx, s.findText, lane, id))
	if err != nil {
		return row, false, false, fmt.Errorf("find row: %w", err)
	}
	return row, parked, found, nil
}

func (s *postgresParking) commands(ctx context.Context, lanes []int, limit int) ([]command, error) {
	var found []command
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		found, err = scanCommands(tx.QueryContext(ctx, s.commandsText, smallints(lanes), limit))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read commands: %w", err)
	}
	return found, nil
}
