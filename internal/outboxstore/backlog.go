package outboxstore

import (
	"context"
	"database/sql"
	"time"
)

// Backlog is what waits in the outbox and in the table of scheduled messages. Counts end at a
// limit, so that they cost the same however much there is.
type Backlog struct {
	Most  int           // where counts end
	Lanes []LaneBacklog // those with rows

	Estimate int64 // rows of the outbox by the statistics of the server; 0 on SQLite

	Scheduled int64         // up to the limit
	Due       int64         // of them, up to the limit
	Late      time.Duration // since the first of them was due
}

// Depth returns how many rows wait in the outbox. full means that counting a lane has ended at
// the limit; n is then the estimate, if that is greater.
func (b Backlog) Depth() (n int64, full bool) {
	for _, l := range b.Lanes {
		n += l.Rows
		full = full || l.Rows >= int64(b.Most)
	}
	if full {
		n = max(n, b.Estimate)
	}
	return n, full
}

// Oldest returns the age of the oldest row that was counted.
func (b Backlog) Oldest() (age time.Duration) {
	for _, l := range b.Lanes {
		age = max(age, l.Oldest)
	}
	return age
}

// LaneBacklog is what waits in a lane.
type LaneBacklog struct {
	Lane   int
	Rows   int64         // up to the limit
	Oldest time.Duration // the age of the oldest of the counted rows
}

// readBacklog reads what the statements of both databases return alike.
func readBacklog(ctx context.Context, db *sql.DB, lanes, scheduled string, most int) (b Backlog, err error) {
	b.Most = most
	rows, err := db.QueryContext(ctx, lanes, most)
	if err != nil {
		return b, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var l LaneBacklog
		var micros int64
		if err := rows.Scan(&l.Lane, &l.Rows, &micros); err != nil {
			return b, err
		}
		l.Oldest = time.Duration(micros) * time.Microsecond
		b.Lanes = append(b.Lanes, l)
	}
	if err := rows.Err(); err != nil {
		return b, err
	}
	var micros int64
	err = db.QueryRowContext(ctx, scheduled, most).Scan(&b.Scheduled, &b.Due, &micros)
	b.Late = time.Duration(micros) * time.Microsecond
	return b, err
}

// Backlog implements [Store].
func (s *postgres) Backlog(ctx context.Context, most int) (Backlog, error) {
	b, err := readBacklog(ctx, s.db, s.q.Backlog, s.q.BacklogScheduled, most)
	if err != nil {
		return b, err
	}
	err = s.db.QueryRowContext(ctx, s.q.Estimate).Scan(&b.Estimate)
	return b, err
}

// Backlog implements [Store].
func (s *sqlite) Backlog(ctx context.Context, most int) (Backlog, error) {
	return readBacklog(ctx, s.db, s.q.Backlog, s.q.BacklogScheduled, most)
}
