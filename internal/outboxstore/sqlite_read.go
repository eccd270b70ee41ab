package outboxstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// knownObject returns {"id": microseconds, ...}: SQLite takes six times as long to
// extract pairs from an array.
func knownObject(known []Known) string {
	object := []byte{'{'}
	for i, k := range known {
		if i > 0 {
			object = append(object, ',')
		}
		object = append(strconv.AppendInt(append(object, '"'), k.ID, 10), `":`...)
		object = strconv.AppendInt(object, k.CreatedAt.UnixMicro(), 10)
	}
	return string(append(object, '}'))
}

func (s *sqlite) Read(ctx context.Context, req ReadRequest) ([]Row, error) {
	busy, err := list(req.Busy)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	hollow, err := list(req.Hollow)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	lanes, err := list(req.Lanes)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	rows, err := s.query(ctx, s.q.Read, []any{req.Rows, knownObject(req.Known), busy, hollow, lanes}, req.Bytes, true)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	return rows, nil
}

// ReadPiece is not needed by readers on SQLite, whose reads always include the payload.
func (s *sqlite) ReadPiece(ctx context.Context, of Ref, offset, most int) (piece []byte, err error) {
	err = s.db.QueryRowContext(ctx, s.q.ReadPiece, of.Lane, of.ID, of.CreatedAt.UnixMicro(), of.MessageID, offset+1, most).Scan(&piece)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read a piece of a message: %w", err)
	}
	return piece, nil
}

func (s *sqlite) ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error) {
	lists := make([]any, 3)
	for i, elements := range [][]string{req.Busy, ahead.Not, ahead.Topics} {
		text, err := list(elements)
		if err != nil {
			return nil, fmt.Errorf("read ahead: %w", err)
		}
		lists[i] = text
	}
	lanes, err := list(req.Lanes)
	if err != nil {
		return nil, fmt.Errorf("read ahead: %w", err)
	}
	args := append([]any{req.Rows, knownObject(req.Known)}, lists...)
	args = append(args, ahead.Newest, ahead.Look, ahead.Unordered, ahead.Scan, req.Bytes, lanes)
	rows, err := s.query(ctx, s.q.ReadAhead, args, math.MaxInt, false)
	if err != nil {
		return nil, fmt.Errorf("read ahead: %w", err)
	}
	turns := make([]int, Lanes)
	for i, l := range req.Lanes {
		turns[l] = i
	}
	slices.SortFunc(rows, func(a, b Row) int { return cmp.Or(turns[a.Lane]-turns[b.Lane], cmp.Compare(a.ID, b.ID)) })
	return rows, nil
}

// query returns the rows of a statement that reads lanes, up to most bytes of each.
func (s *sqlite) query(ctx context.Context, text string, args []any, most int, ordered bool) (out []Row, err error) {
	rows, err := s.db.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	lane, last, bytes := -1, int64(0), 0
	for rows.Next() {
		var r Row
		var micros int64
		if err := rows.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &micros, &r.Hollow, &r.Payload, &r.Metadata); err != nil {
			return nil, err
		}
		switch {
		case r.Lane != lane:
			lane, bytes = r.Lane, 0
		case ordered && r.ID <= last: // the order of keys depends on it
			return nil, errAnswer
		}
		last = r.ID
		// Skip the rest of the lane here rather than in SQL: the rows come from this
		// process's own page cache.
		if bytes >= most && bytes > 0 {
			continue
		}
		bytes += len(r.Payload) + len(r.Metadata)
		r.CreatedAt = time.UnixMicro(micros).UTC()
		if !r.Hollow { // the driver returns nil for empty
			r.Payload, r.Metadata = orEmpty(r.Payload), orEmpty(r.Metadata)
		}
		out = append(out, r)
	}
	return out, rows.Err()
}
