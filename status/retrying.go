package status

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// RetryingFilter selects retrying messages: those that match all fields that are set.
type RetryingFilter struct {
	Topic string
	Key   string // a key has at most one retrying message; the others of the key are behind it

	// Limit is the largest number of messages. Default: 100. At most 1000.
	Limit int
}

// Retrying is a message that was refused or set aside, and waits for its next attempt.
type Retrying struct {
	Lane      int
	ID        int64 // of the outbox
	Topic     string
	MessageID string
	Key       string `json:",omitempty"`
	Size      int    // of the payload, in bytes

	// Attempts is how many are used up. 0: it was only set aside.
	Attempts int

	// MayHaveBeenDelivered means that an attempt had no answer.
	MayHaveBeenDelivered bool

	CreatedAt time.Time
	Since     time.Time // when it left the outbox
	NextAt    time.Time // of the next attempt, by the database's clock
	Due       Age       // until the next attempt; negative since

	// Errors are those of the last ten attempts, the newest last.
	Errors []dlq.Attempt

	// Behind is how many messages of its key wait behind it in the table parked.
	Behind Count
}

const (
	retryingByDefault = 100
	mostRetrying      = 1000
	mostBehind        = 1000
)

// Retrying returns messages that wait for their next attempt, those with the earliest next
// attempt first. Of more than 10,000 without a filter, it looks at some in each lane. It reads
// by an index and does not read payloads.
func (r *Reader) Retrying(ctx context.Context, f RetryingFilter) ([]Retrying, error) {
	switch {
	case f.Limit == 0:
		f.Limit = retryingByDefault
	case f.Limit < 0 || f.Limit > mostRetrying:
		return nil, &oncemill.ConfigError{Field: "status.RetryingFilter.Limit", Value: strconv.Itoa(f.Limit), Problem: "must be 1 to " + strconv.Itoa(mostRetrying)}
	}
	if err := oncemill.CheckMigrated(ctx, r.db, r.where.Config(), relay.Migrations); err != nil {
		return nil, err
	}
	rows, err := bounded.Do(ctx, r.calls, partLimit, func(ctx context.Context) ([]relaystore.Retrying, error) {
		return relaystore.Open(r.db, r.where).Retrying(ctx, relaystore.RetryingFilter{
			Topic: f.Topic, Key: f.Key, Lane: outbox.Lane(f.Key, ""), Limit: f.Limit,
		})
	})
	if err != nil {
		return nil, fmt.Errorf("status: read retrying messages: %w", err)
	}
	all := make([]Retrying, 0, len(rows))
	var errs []error
	for _, row := range rows {
		if f.Topic != "" && row.Topic != f.Topic { // with a key, the statement looks at the key alone
			continue
		}
		attempts, err := dlqstore.DecodeAttempts(row.Errors)
		errs = append(errs, err)
		m := Retrying{
			Lane: row.Lane, ID: row.ID, Topic: row.Topic, MessageID: row.MessageID, Key: row.Key, Size: row.Size, Attempts: row.Attempts,
			MayHaveBeenDelivered: row.Unanswered || row.Crashed, CreatedAt: row.CreatedAt, Since: row.Since, NextAt: row.NextAt, Due: Age(row.Due),
			Errors: make([]dlq.Attempt, 0, len(attempts)), Behind: Count{N: int64(row.Behind), AtLeast: row.Behind >= mostBehind},
		}
		for _, a := range attempts {
			m.Errors = append(m.Errors, dlq.Attempt(a))
		}
		all = append(all, m)
	}
	return all, errors.Join(errs...)
}
