package auditstore

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/text"
)

// store is what the databases have in common.
type store struct {
	db   *sql.DB
	text texts
	list func([]string) any // as an argument
}

func (s *store) Record(ctx context.Context, tx oncemill.Tx, act Act) error {
	subjects := make([]string, len(act.Subjects))
	for i, subject := range act.Subjects {
		subjects[i] = text.Clean(subject)
	}
	_, err := tx.ExecContext(ctx, s.text.Record, text.Clean(act.By), text.Clean(act.Reason), act.Action, s.list(subjects), text.Clean(act.Details))
	switch {
	case sqlerr.NoTable(err):
		return fmt.Errorf("audit: %w: %w", ErrNotMigrated, err)
	case err != nil:
		return fmt.Errorf("audit: %w", err)
	}
	return nil
}

// by returns the statement by the index that admits the fewest entries.
func (t *texts) by(f *Filter) (newest, oldest string) {
	switch {
	case f.Subject != "":
		return t.NewestBySubject, t.OldestBySubject
	case f.By != "":
		return t.NewestByActor, t.OldestByActor
	case f.Action != "":
		return t.NewestByAction, t.OldestByAction
	}
	return t.NewestByTime, t.OldestByTime
}

func (s *store) List(ctx context.Context, f Filter) (entries []Entry, err error) {
	query, oldest := s.text.by(&f)
	start := int64(lastMicros)
	if f.OldestFirst {
		query, start = oldest, firstMicros
	}
	if !f.AfterAt.IsZero() || f.AfterID != 0 {
		start = f.AfterAt.UnixMicro()
	}
	rows, err := s.db.QueryContext(ctx, query, f.Limit, f.By, f.Action, f.Subject,
		microsOr(f.Since, firstMicros), microsOr(f.Until, lastMicros), start, f.AfterID)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var e Entry
		var at int64
		if err := rows.Scan(&e.ID, &at, &e.Role, &e.By, &e.Reason, &e.Action, &e.Subject, &e.Details); err != nil {
			return nil, err
		}
		e.At = time.UnixMicro(at).UTC()
		entries = append(entries, e)
	}
	return entries, rows.Err()
}

// The years 1 and 9999, in microseconds since 1970.
const (
	firstMicros = -62135596800000000
	lastMicros  = 253402300799999999
)

func microsOr(t time.Time, otherwise int64) int64 {
	if t.IsZero() {
		return otherwise
	}
	return t.UnixMicro()
}
