package relaystore

import (
	"context"
	"database/sql"
	"time"
)

// Observations are what an operator wants to know. They write nothing and lock nothing.
type Observations interface {
	// Waiting counts the messages that wait in parked, up to so many of each kind.
	Waiting(ctx context.Context, most int) (Waiting, error)

	// Retrying returns messages that wait for their next attempt, those with the earliest
	// next attempt first. If there are more than 10,000, it looks at some of them.
	Retrying(ctx context.Context, f RetryingFilter) ([]Retrying, error)

	// Owners returns the owner of each lane.
	Owners(ctx context.Context) ([]Owner, error)

	// Workers returns the workers that were seen within the last hour, at most 1000.
	Workers(ctx context.Context) ([]Seen, error)
}

// Waiting are the numbers of messages in parked. Each ends at the limit of the call.
type Waiting struct {
	Retrying int64 // with a time for the next attempt
	HeldKeys int64 // heads of keys that a dead letter holds
	All      int64 // with those behind others of their keys
	SetAside int64 // of those in Retrying, those that have used up no attempt

	// The ages of the oldest, since they were written: of those in Retrying and of those in
	// SetAside.
	Oldest, OldestSetAside time.Duration
}

// Owner is who has a lane.
type Owner struct {
	Lane  int
	Owner string        // "" if nobody has
	Left  time.Duration // of the lease; negative since it ended, down to an hour
}

// Alive reports whether the owner holds the lane.
func (o Owner) Alive() bool { return o.Owner != "" && o.Left > 0 }

// Seen is a worker.
type Seen struct {
	Owner, Name     string
	Up              time.Duration // since it has started
	Left            time.Duration // until it counts as gone; negative since then
	Ready, Stopping bool
	Host, Version   string        // empty: of a library that does not write them
	Problem         string        // why it is not ready
	Heartbeat       time.Duration // since its last heartbeat; negative: not known
}

func (s *postgres) Waiting(ctx context.Context, most int) (Waiting, error) {
	return readWaiting(ctx, s.db, s.q.Waiting, most)
}

func (s *sqlite) Waiting(ctx context.Context, most int) (Waiting, error) {
	return readWaiting(ctx, s.db, s.q.Waiting, most)
}

func readWaiting(ctx context.Context, db *sql.DB, text string, most int) (w Waiting, err error) {
	var oldest, aside int64
	err = db.QueryRowContext(ctx, text, most).Scan(&w.Retrying, &w.HeldKeys, &w.All, &w.SetAside, &oldest, &aside)
	w.Oldest, w.OldestSetAside = time.Duration(oldest)*time.Microsecond, time.Duration(aside)*time.Microsecond
	return w, err
}

func (s *postgres) Owners(ctx context.Context) ([]Owner, error) {
	return readOwners(ctx, s.db, s.q.Owners)
}

func (s *sqlite) Owners(ctx context.Context) ([]Owner, error) {
	return readOwners(ctx, s.db, s.q.Owners)
}

func readOwners(ctx context.Context, db *sql.DB, text string) (all []Owner, err error) {
	err = eachRow(ctx, db, text, func(rows *sql.Rows) error {
		var o Owner
		var left int64
		err := rows.Scan(&o.Lane, &o.Owner, &left)
		o.Left = time.Duration(left) * time.Microsecond
		all = append(all, o)
		return err
	})
	return all, err
}

func (s *postgres) Workers(ctx context.Context) ([]Seen, error) {
	return readWorkers(ctx, s.db, s.q.Workers)
}

func (s *sqlite) Workers(ctx context.Context) ([]Seen, error) {
	return readWorkers(ctx, s.db, s.q.Workers)
}

func readWorkers(ctx context.Context, db *sql.DB, text string) (all []Seen, err error) {
	err = eachRow(ctx, db, text, func(rows *sql.Rows) error {
		var w Seen
		var up, left, beat int64
		err := rows.Scan(&w.Owner, &w.Name, &up, &left, &w.Ready, &w.Stopping, &w.Host, &w.Version, &w.Problem, &beat)
		w.Heartbeat = time.Duration(beat) * time.Microsecond
		w.Up, w.Left = time.Duration(up)*time.Microsecond, time.Duration(left)*time.Microsecond
		all = append(all, w)
		return err
	})
	return all, err
}

func eachRow(ctx context.Context, db *sql.DB, text string, scan func(*sql.Rows) error) error {
	rows, err := db.QueryContext(ctx, text)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}
