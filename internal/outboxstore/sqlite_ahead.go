package outboxstore

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// As postgresReadAhead. ?1 to ?3 are those of sqliteReadLane, ?4 the topics to leave
// out, ?5 those to take, ?6 the number of the newest rows of others, ?7 the newest rows
// of each lane to choose from, ?8 says that keys do not order rows, and ?9 is the number
// of rows among which to look for earlier ones of their keys. ?10 is the bytes of a lane.
// What is sorted has no payloads.
const (
	sqliteNewest = `select * from (select lane, id, created_at, topic, key from {{outbox}} where lane = ?lane order by id desc limit ?7)`

	sqliteReadAhead = `
with fresh as materialized (
	select n.*, n.topic in (select value from json_each(?5)) as wanted
	from (?newest) n
	where case when (n.id, n.created_at) in (select cast(key as integer), value from json_each(?2)) then false else true end
		and n.key not in (select value from json_each(?3))
		and n.topic not in (select value from json_each(?4))
), keys as materialized (
	select s.key, min(s.id) as first
	from (select id, created_at, key from {{outbox}} limit ?9) s
	where s.key in (select key from fresh)
		and case when (s.id, s.created_at) in (select cast(key as integer), value from json_each(?2)) then false else true end
	group by s.key
), chosen as materialized (
	select f.id, sum(length(o.payload) + length(o.metadata))
		over (partition by f.lane order by f.wanted desc, f.id rows between unbounded preceding and 1 preceding) as bytes_before
	from (
		select f.*, row_number() over (partition by f.lane, f.wanted order by iif(f.wanted, f.id, -f.id)) as place
		from fresh f
		where ?8 or f.key = '' or (f.key, f.id) in (
			select key, first from keys where (select count(*) from (select 1 from {{outbox}} limit ?9)) < ?9
		)
	) f
	join {{outbox}} o on o.id = f.id and length(o.payload) + length(o.metadata) <= ?10
	where f.place <= iif(f.wanted, ?1, ?6)
)
select o.lane, o.id, o.topic, o.message_id, o.key, o.created_at, false, o.payload, o.metadata
from chosen c
join {{outbox}} o on o.id = c.id
where coalesce(c.bytes_before, 0) < ?10`
)

func (s *sqliteStore) ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error) {
	if len(req.Lanes) == 0 {
		return nil, nil
	}
	args := []any{req.Rows, knownObject(req.Known)}
	for _, list := range [][]string{req.Busy, ahead.Not, ahead.Topics} {
		text, err := json.Marshal(orEmpty(list))
		if err != nil {
			return nil, fmt.Errorf("read ahead: %w", err)
		}
		args = append(args, string(text))
	}
	args = append(args, ahead.Newest, ahead.Look, ahead.Unordered, ahead.Scan, req.Bytes)
	lanes, turns := make([]string, len(req.Lanes)), make([]int, Lanes)
	for i, l := range req.Lanes {
		args = append(args, l)
		lanes[i], turns[l] = strings.ReplaceAll(sqliteNewest, "?lane", fmt.Sprintf("?%d", len(args))), i
	}
	text := s.names.Expand(strings.ReplaceAll(sqliteReadAhead, "?newest", strings.Join(lanes, " union all ")))
	rows, err := s.query(ctx, text, args, math.MaxInt)
	if err != nil {
		return nil, fmt.Errorf("read ahead: %w", err)
	}
	slices.SortFunc(rows, func(a, b Row) int { return cmp.Or(turns[a.Lane]-turns[b.Lane], cmp.Compare(a.ID, b.ID)) })
	return rows, nil
}
