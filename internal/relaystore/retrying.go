package relaystore

import (
	"context"
	"database/sql"
	"time"
)

// RetryingFilter selects retrying messages: those of a key, or else of a topic, or else all.
type RetryingFilter struct {
	Topic string
	Key   string
	Lane  int // of Key
	Limit int
}

// Retrying is a message that waits for its next attempt.
type Retrying struct {
	Lane       int
	ID         int64
	Topic      string
	MessageID  string
	Key        string
	Attempts   int  // used up
	Crashed    bool // an attempt ended with the death of its worker
	Unanswered bool // an attempt had no answer
	Size       int  // of the payload
	CreatedAt  time.Time
	Since      time.Time     // when it was moved to parked
	NextAt     time.Time     // of the next attempt
	Due        time.Duration // until then; negative since
	Errors     []byte        // of the last ten attempts, as JSON
	Behind     int           // messages of its key in parked behind it, up to 1000
}

// Retrying implements [Observations].
func (s *postgres) Retrying(ctx context.Context, f RetryingFilter) ([]Retrying, error) {
	return readRetrying(ctx, s.db, f, s.q.Retrying, s.q.RetryingTopic, s.q.RetryingKey)
}

// Retrying implements [Observations].
func (s *sqlite) Retrying(ctx context.Context, f RetryingFilter) ([]Retrying, error) {
	return readRetrying(ctx, s.db, f, s.q.Retrying, s.q.RetryingTopic, s.q.RetryingKey)
}

func readRetrying(ctx context.Context, db *sql.DB, f RetryingFilter, all, ofTopic, ofKey string) (found []Retrying, err error) {
	query, args := all, []any{f.Limit}
	switch {
	case f.Key != "":
		query, args = ofKey, append(args, f.Lane, f.Key)
	case f.Topic != "":
		query, args = ofTopic, append(args, f.Topic)
	}
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var r Retrying
		var created, since, next, due int64
		err := rows.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Attempts, &r.Crashed, &r.Unanswered, &r.Size,
			&created, &since, &next, &due, &r.Errors, &r.Behind)
		if err != nil {
			return nil, err
		}
		r.CreatedAt, r.Since, r.NextAt = time.UnixMicro(created).UTC(), time.UnixMicro(since).UTC(), time.UnixMicro(next).UTC()
		r.Due = time.Duration(due) * time.Microsecond
		found = append(found, r)
	}
	return found, rows.Err()
}
