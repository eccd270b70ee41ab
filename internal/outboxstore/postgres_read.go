package outboxstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/shorttx"
)

func (s *postgres) ReadPiece(ctx context.Context, of Ref, offset, most int) (piece []byte, err error) {
	err = s.db.QueryRowContext(ctx, s.q.ReadPiece, of.Lane, of.ID, of.CreatedAt.UnixMicro(), of.MessageID, offset+1, most, of.CTID.String()).Scan(&piece)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read a piece of a message: %w", err)
	}
	return piece, nil
}

func (s *postgres) Read(ctx context.Context, req ReadRequest) ([]Row, error) {
	if req.Peek {
		if filled, err := s.peek(ctx, req.Lanes); err != nil || !filled {
			return nil, err
		}
	}
	rows, large, err := s.readPacked(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	if len(large) == 0 {
		return rows, nil
	}
	req.Lanes, large = large, req.Lanes
	more, err := s.readRows(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("read lanes of large messages: %w", err)
	}
	merged := make([]Row, 0, len(rows)+len(more))
	for _, lane := range large {
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

// peek reports whether any of these lanes has a row.
func (s *postgres) peek(ctx context.Context, lanes []int) (filled bool, err error) {
	rows, err := s.db.QueryContext(ctx, s.q.Peek)
	if err != nil {
		return false, fmt.Errorf("look for rows: %w", err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var lane int
		if err := rows.Scan(&lane); err != nil {
			return false, fmt.Errorf("look for rows: %w", err)
		}
		filled = filled || slices.Contains(lanes, lane)
	}
	if err := rows.Err(); err != nil {
		return false, fmt.Errorf("look for rows: %w", err)
	}
	return filled, nil
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
func (s *postgres) readPacked(ctx context.Context, req ReadRequest) (out []Row, large []int, err error) {
	share := req.Bytes / max(1, req.Rows)
	rows, err := s.db.QueryContext(ctx, s.q.Read, readArgs(req, share)...)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	var mem slab
	for rows.Next() {
		var p packedLane
		if err := rows.Scan(&p.lane, &p.numbers, &p.topics, &p.messageIDs, &p.keys, &p.payloads, &p.metadata); err != nil {
			return nil, nil, err
		}
		if p.large(share) {
			large = append(large, p.lane)
			continue
		}
		if n := len(p.numbers) / numbersWidth; out == nil && n > 0 {
			out = make([]Row, 0, n*len(req.Lanes)) // lanes are alike
		}
		if out, err = p.unpack(out, &mem); err != nil {
			return nil, nil, err
		}
	}
	return out, large, rows.Err()
}

// readRows reads lanes row by row, up to their byte budget.
func (s *postgres) readRows(ctx context.Context, req ReadRequest) (out []Row, err error) {
	return scanRows(s.db.QueryContext(ctx, s.q.ReadLarge, readArgs(req, req.Bytes)...))
}

func scanRows(rows *sql.Rows, err error) (out []Row, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
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

// aheadLimit is how long the call may take: nobody waits for it, and others wait behind
// it.
const aheadLimit = 2 * time.Second

func (s *postgres) ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error) {
	req.Hollow = ahead.Not
	args := append(readArgs(req, req.Bytes), pq.Array(orEmpty(ahead.Topics)), ahead.Newest, ahead.Look, ahead.Unordered, ahead.Scan)
	var rows []Row
	err := shorttx.Run(ctx, s.db, shorttx.Limits{Lock: aheadLimit / 4, Statement: aheadLimit}, func(tx *sql.Tx) (err error) {
		rows, err = scanRows(tx.QueryContext(ctx, s.q.ReadAhead, args...))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read ahead: %w", err)
	}
	return rows, nil
}
