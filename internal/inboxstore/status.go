package inboxstore

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// ConsumerCount is what there is of a consumer. Numbers end at the limit of the call, except
// Refused.
type ConsumerCount struct {
	Handled        int64         // ids
	Oldest, Newest time.Duration // ages of the oldest and the newest id
	Failing        int64         // failure records of messages that have not been handled
	Refused        int64         // messages refused for their signature or encoding, since the beginning
}

// CountConsumer implements [Store].
func (s *store) CountConsumer(ctx context.Context, most int) (c ConsumerCount, err error) {
	var oldest, newest int64
	err = s.db.QueryRowContext(ctx, s.text.CountConsumer, s.consumer, most).Scan(&c.Handled, &oldest, &newest, &c.Failing, &c.Refused)
	c.Oldest, c.Newest = time.Duration(oldest)*time.Microsecond, time.Duration(newest)*time.Microsecond
	return c, err
}

// HandledAt implements [Store].
func (s *store) HandledAt(ctx context.Context, id string) (at time.Time, dead, found bool, err error) {
	var micros int64
	err = s.db.QueryRowContext(ctx, s.text.HandledAt, s.consumer, id).Scan(&micros, &dead)
	if errors.Is(err, sql.ErrNoRows) {
		return at, false, false, nil
	}
	return time.UnixMicro(micros).UTC(), dead, err == nil, err
}

// Handled implements [Store].
func (s *store) Handled(ctx context.Context, ids []string) (handled []string, err error) {
	rows, err := s.db.QueryContext(ctx, s.text.Handled, s.consumer, s.list(ids))
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		handled = append(handled, id)
	}
	return handled, rows.Err()
}
