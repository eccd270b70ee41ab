package outboxstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/lib/pq"
)

// WaitingFilter selects rows of the outbox: those that match all fields that are set, of the
// lanes, and among the first Look rows behind After (of each lane on PostgreSQL).
type WaitingFilter struct {
	Lanes     []int
	Look      int
	After     int64
	ID        int64
	Topic     string
	Key       string
	MessageID string
	Brief     bool // without payload and metadata
	Limit     int
}

// WaitingRow is a row of the outbox.
type WaitingRow struct {
	ID        int64
	Lane      int
	Topic     string
	MessageID string
	Key       string // empty for an unkeyed message
	Payload   []byte
	Metadata  []byte // a JSON object of strings; empty for none
	Size      int    // of the payload
	CreatedAt time.Time
}

// ListWaiting implements [Store].
func (s *postgres) ListWaiting(ctx context.Context, f WaitingFilter) ([]WaitingRow, error) {
	lanes := make([]int64, len(f.Lanes))
	for i, lane := range f.Lanes {
		lanes[i] = int64(lane)
	}
	return scanWaiting(s.db.QueryContext(ctx, s.q.ListWaiting, pq.Array(lanes), f.Look, f.After, f.ID, f.Topic, f.Key, f.MessageID, f.Brief, f.Limit))
}

// ListWaiting implements [Store].
func (s *sqlite) ListWaiting(ctx context.Context, f WaitingFilter) ([]WaitingRow, error) {
	lanes, err := list(f.Lanes)
	if err != nil {
		return nil, err
	}
	return scanWaiting(s.db.QueryContext(ctx, s.q.ListWaiting, lanes, f.Look, f.After, f.ID, f.Topic, f.Key, f.MessageID, f.Brief, f.Limit))
}

func scanWaiting(rows *sql.Rows, err error) ([]WaitingRow, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	var out []WaitingRow
	for rows.Next() {
		var r WaitingRow
		var created int64
		if err := rows.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Payload, &r.Metadata, &r.Size, &created); err != nil {
			return nil, err
		}
		r.CreatedAt = time.UnixMicro(created).UTC()
		out = append(out, r)
	}
	return out, rows.Err()
}
