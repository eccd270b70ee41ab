package outboxstore

import (
	"database/sql"
	"time"
)

// HistoryRow is a message that the broker has confirmed.
type HistoryRow struct {
	ID        int64
	Lane      int
	Topic     string
	MessageID string
	Key       string // empty for an unkeyed message
	Payload   []byte
	Metadata  []byte // a JSON object of strings; empty for none
	Size      int    // of the payload, in bytes
	CreatedAt time.Time
	RelayedAt time.Time
}

// HistoryPosition is a position in the history.
type HistoryPosition struct {
	ID        int64
	RelayedAt time.Time
}

// HistoryFilter selects rows of the history: those that match all fields that are set.
type HistoryFilter struct {
	IDs        []int64
	MessageIDs []string
	Key        string
	Topic      string
	From, To   time.Time
	After      HistoryPosition
	Brief      bool // without payload and metadata; for ListHistory
	Limit      int
}

// Day is a partition of the history.
type Day struct {
	Name   string        // YYYYMMDD
	Filled bool          // it has rows, dead ones included
	Past   time.Duration // since its end, by the server's clock
}

// Retiring is what RetireHistoryDay does.
type Retiring struct {
	Drop  bool // instead of only emptying it
	Empty bool // only if it has no rows
}

// ExpiredLimits bound a batch of Expired.
type ExpiredLimits struct {
	Retention time.Duration
	Rows      int
	Bytes     int // of payload and metadata; the last row may exceed it
}

// Expired is a batch of history rows past their retention.
type Expired struct {
	Rows   []HistoryRow
	day    string  // the day of all rows; PostgreSQL
	rowids []int64 // of each; SQLite
}

// scanHistory reads rows of the history; times are in microseconds.
func scanHistory(rows *sql.Rows, err error) ([]HistoryRow, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	var out []HistoryRow
	for rows.Next() {
		var r HistoryRow
		var created, relayed int64
		if err := rows.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Payload, &r.Metadata, &r.Size, &created, &relayed); err != nil {
			return nil, err
		}
		r.CreatedAt, r.RelayedAt = time.UnixMicro(created).UTC(), time.UnixMicro(relayed).UTC()
		out = append(out, r)
	}
	return out, rows.Err()
}
