package outboxstore

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"
)

// Each lane is returned packed in one row. $1 are the lanes, $2 is the number of rows
// of each, $3 and $4 are the known rows, $5 the busy keys, $6 the topics whose rows
// come hollow: payload and metadata null. Rows with more than $7 bytes come without
// payload and metadata; a lane with such a row is read again by postgresReadBulky. The
// migration that creates the function documents how it reads.
const postgresRead = `select * from {{outbox_read}}($1, $2, $3, $4, $5, $6, $7)`

// The function's query for one lane, used for the few lanes that hold large rows.
//
// It is planned at each execution (an unnamed statement): a plan kept from a time when
// the table was empty scans and sorts, unless it may do neither. The arrays are behind
// sub-selects, so that planning does not weigh each element (36 ms with 4,000 known
// rows), and "not in" is a hashed subplan on every version.
//
// The limit appears twice. The inner one hides its number: if that is above the rows
// that old statistics predict for a lane, the planner would fetch the whole lane and
// sort it. The outer one shows it: without it the estimate is a tenth of the lane, and
// a large backlog makes the planner compile the statement (JIT) at each execution. One
// condition instead of two halves the estimate for the same reason.
const postgresLaneRows = `
		select *
		from (
			select o.ctid as place, o.lane, o.id, o.topic, o.message_id, o.key, o.created_at,
				case when o.topic not in (select unnest((select $6::text[]))) then o.payload end as payload,
				case when o.topic not in (select unnest((select $6::text[]))) then o.metadata end as metadata
			from {{outbox}} o
			where o.lane = l.lane
				and case
					when (select $3::bigint[])[width_bucket(o.id, (select $3::bigint[]))] = o.id
						and o.created_at = timestamptz 'epoch' + (select $4::bigint[])[width_bucket(o.id, (select $3::bigint[]))] * interval '1 microsecond'
					then false
					else o.key not in (select unnest((select $5::text[])))
				end
			order by o.id
			limit (select $2::bigint)
		) h
		limit $2`

// $7 is the byte budget of a lane. Hollow rows add nothing to the sum. A larger payload
// is not returned, so that no answer is too large for its time.
const postgresReadBulky = `
select m.lane, int8send(m.id) || timestamptz_send(m.created_at) || tidsend(m.place), m.topic, m.message_id, m.key, m.payload is null,
	case when octet_length(m.payload) <= $7 then m.payload end, m.metadata,
	case when octet_length(m.payload) > $7 then octet_length(m.payload) else 0 end
from unnest($1::smallint[]) as l (lane)
cross join lateral (
	select *
	from (
		select f.*,
			sum(octet_length(f.payload) + octet_length(f.metadata))
				over (rows between unbounded preceding and 1 preceding) as bytes_before
		from (` + postgresLaneRows + `
		) f
	) w
	where coalesce(w.bytes_before, 0) < $7
) m`

// The server reads only the piece of a payload that is stored out of line and not
// compressed. A row that was changed has another place: no message is assembled from
// pieces of two.
const postgresReadPiece = `
select substring(o.payload from $5 for $6)
from {{outbox}} o
where o.lane = $1 and o.id = $2 and o.created_at = timestamptz 'epoch' + $3 * interval '1 microsecond' and o.message_id = $4
	and o.ctid = $7::tid`

func (s *postgresStore) ReadPiece(ctx context.Context, of Ref, offset, most int) (piece []byte, err error) {
	err = s.db.QueryRowContext(ctx, s.readPieceText, of.Lane, of.ID, of.CreatedAt.UnixMicro(), of.MessageID, offset+1, most, of.CTID.String()).Scan(&piece)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read a piece of a message: %w", err)
	}
	return piece, nil
}

func (s *postgresStore) Read(ctx context.Context, req ReadRequest) ([]Row, error) {
	rows, bulky, err := s.readPacked(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	if len(bulky) == 0 {
		return rows, nil
	}
	req.Lanes, bulky = bulky, req.Lanes
	more, err := s.readRows(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("read lanes of large messages: %w", err)
	}
	merged := make([]Row, 0, len(rows)+len(more))
	for _, lane := range bulky {
		for _, from := range []*[]Row{&rows, &more} {
			n := 0
			for n < len(*from) && (*from)[n].Lane == lane {
				n++
			}
			merged = append(merged, (*from)[:n]...)
			*from = (*from)[n:]
		}
	}
	return merged, nil
}

func readArgs(req ReadRequest, bytes int) []any {
	lanes := make([]int64, len(req.Lanes))
	for i, l := range req.Lanes {
		lanes[i] = int64(l)
	}
	// Of rows with one id the newest comes last, where the statement looks: the others
	// are of a server that is gone.
	known := slices.SortedFunc(slices.Values(req.Known), func(a, b Known) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), a.CreatedAt.Compare(b.CreatedAt))
	})
	ids, times := make([]int64, len(known)), make([]int64, len(known))
	for i, k := range known {
		ids[i], times[i] = k.ID, k.CreatedAt.UnixMicro()
	}
	return []any{
		pq.Array(lanes), req.Rows, pq.Array(ids), pq.Array(times),
		pq.Array(orEmpty(req.Busy)), pq.Array(orEmpty(req.Hollow)), bytes,
	}
}

// orEmpty keeps pq.Array from sending NULL for an empty list.
func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// readPacked returns the rows of all lanes except those that hold a row with more than
// its share of the bytes.
func (s *postgresStore) readPacked(ctx context.Context, req ReadRequest) (out []Row, bulky []int, err error) {
	share := req.Bytes / max(1, req.Rows)
	rows, err := s.db.QueryContext(ctx, s.readText, readArgs(req, share)...)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var mem slab
	for rows.Next() {
		var p packedLane
		if err := rows.Scan(&p.lane, &p.numbers, &p.topics, &p.messageIDs, &p.keys, &p.payloads, &p.metadata); err != nil {
			return nil, nil, err
		}
		if p.bulky(share) {
			bulky = append(bulky, p.lane)
			continue
		}
		if n := len(p.numbers) / numbersWidth; out == nil && n > 0 {
			out = make([]Row, 0, n*len(req.Lanes)) // lanes are alike
		}
		if out, err = p.unpack(out, &mem); err != nil {
			return nil, nil, err
		}
	}
	return out, bulky, rows.Err()
}

// packedLane is a lane as returned by postgresRead. The driver owns the memory.
type packedLane struct {
	lane                                                  int
	numbers, topics, messageIDs, keys, payloads, metadata sql.RawBytes
}

// The numbers of a row: its identity (id, time, place) and two lengths.
const (
	identityWidth = 8 + 8 + 6
	numbersWidth  = identityWidth + 4 + 4
)

// lengths returns -1 and 0 for a hollow row.
func lengths(numbers []byte) (payload, metadata int) {
	length := func(at int) int { return int(int32(binary.BigEndian.Uint32(numbers[at:]))) } //nolint:gosec // as int4send wrote it
	return length(identityWidth), length(identityWidth + 4)
}

func (p *packedLane) bulky(share int) bool {
	for numbers := range slices.Chunk(p.numbers, numbersWidth) {
		if payload, metadata := lengths(numbers); payload+metadata > share {
			return true
		}
	}
	return false
}

var errAnswer = errors.New("the answer does not have the expected form")

// unpack appends the rows of the lane. Texts share memory.
func (p *packedLane) unpack(rows []Row, mem *slab) ([]Row, error) {
	topics, messageIDs, keys := string(p.topics), string(p.messageIDs), string(p.keys)
	for numbers := range slices.Chunk([]byte(p.numbers), numbersWidth) {
		payload, metadata := lengths(numbers)
		if payload > len(p.payloads) || metadata > len(p.metadata) {
			return nil, errAnswer
		}
		r := Row{Ref: Ref{Lane: p.lane}, Hollow: payload < 0}
		r.identify(numbers)
		if !r.Hollow {
			r.Payload, r.Metadata = mem.clone(p.payloads[:payload]), mem.clone(p.metadata[:metadata])
			p.payloads, p.metadata = p.payloads[payload:], p.metadata[metadata:]
		}
		r.Topic, topics, _ = strings.Cut(topics, "\x00")
		r.MessageID, messageIDs, _ = strings.Cut(messageIDs, "\x00")
		r.Key, keys, _ = strings.Cut(keys, "\x00")
		rows = append(rows, r)
	}
	if len(p.payloads)+len(p.metadata)+len(topics)+len(messageIDs)+len(keys) > 0 {
		return nil, errAnswer
	}
	return rows, nil
}

// postgresEpoch is PostgreSQL's epoch, in microseconds since 1970.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

// identify decodes the numbers of an identity: id, time, place.
func (r *Ref) identify(numbers []byte) {
	r.ID = int64(binary.BigEndian.Uint64(numbers))
	r.CreatedAt = time.UnixMicro(int64(binary.BigEndian.Uint64(numbers[8:])) + postgresEpoch).UTC()
	r.CTID = CTIDOf(numbers[16 : 16+ctidWidth])
}

// readRows reads lanes row by row, up to their byte budget.
func (s *postgresStore) readRows(ctx context.Context, req ReadRequest) (out []Row, err error) {
	return scanRows(s.db.QueryContext(ctx, s.readBulky, readArgs(req, req.Bytes)...))
}

func scanRows(rows *sql.Rows, err error) (out []Row, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		var r Row
		var numbers []byte
		if err := rows.Scan(&r.Lane, &numbers, &r.Topic, &r.MessageID, &r.Key, &r.Hollow, &r.Payload, &r.Metadata, &r.Missing); err != nil {
			return nil, err
		}
		if len(numbers) != identityWidth {
			return nil, errAnswer
		}
		r.identify(numbers)
		out = append(out, r)
	}
	return out, rows.Err()
}

// slab allocates memory for small pieces. A piece that lives on keeps at most slabSize
// bytes from being freed.
type slab struct{ free []byte }

const slabSize = 32 << 10

// clone never returns nil, which would be NULL.
func (s *slab) clone(b []byte) []byte {
	if len(b) > slabSize/8 {
		return bytes.Clone(b)
	}
	if s.free == nil || len(b) > cap(s.free)-len(s.free) {
		s.free = make([]byte, 0, slabSize)
	}
	s.free = append(s.free, b...)
	return s.free[len(s.free)-len(b) : len(s.free) : len(s.free)]
}
