package outbox

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// WaitingRow is a message in the outbox: in flight, or before its first attempt.
type WaitingRow struct {
	ID        int64
	Lane      int
	Topic     string
	MessageID string
	Key       string    // empty for an unkeyed message
	Payload   []byte    // empty in a brief list
	Metadata  []byte    // a JSON object of strings; empty for none, and in a brief list
	Size      int       // of the payload, in bytes
	CreatedAt time.Time // by the database's clock, at the insert
}

// WaitingFilter selects rows of the outbox: those that match all fields that are set.
type WaitingFilter struct {
	ID        int64
	Topic     string
	Key       string
	MessageID string

	// After is where a page starts: behind this id.
	After int64

	// Brief leaves out payloads and metadata.
	Brief bool

	// Limit is the largest number of rows. Default: 100. At most 10,000.
	Limit int
}

// lookedAt is how many rows Waiting looks at.
const lookedAt = 10_000

// Waiting returns messages in the outbox in the order of their ids. Without ID, it looks at the
// first 10,000 rows behind After and no more: of each lane, or of that of Key, on PostgreSQL. So
// it costs the same however much waits; what is further behind comes with a later After. The
// error is a [*FilterError] if the filter is invalid.
func (o *Outbox) Waiting(ctx context.Context, f WaitingFilter) ([]WaitingRow, error) {
	switch {
	case f.Limit == 0:
		f.Limit = listByDefault
	case f.Limit < 0 || f.Limit > mostOfHistory:
		return nil, &FilterError{Field: "Limit", Problem: "must be 1 to " + strconv.Itoa(mostOfHistory) + ", or 0 for " + strconv.Itoa(listByDefault)}
	}
	if f.ID < 0 || f.After < 0 {
		return nil, &FilterError{Field: "ID", Problem: "must not be negative"}
	}
	for _, text := range []struct {
		field, value string
		most         int
	}{{"Topic", f.Topic, maxTopic}, {"Key", f.Key, maxKey}, {"MessageID", f.MessageID, maxID}} {
		if problem := checkText(text.value, text.most, false); problem != "" {
			return nil, &FilterError{Field: text.field, Problem: problem}
		}
	}
	stored := outboxstore.WaitingFilter{
		Look: lookedAt, After: f.After, ID: f.ID, Topic: f.Topic, Key: f.Key, MessageID: f.MessageID, Brief: f.Brief, Limit: f.Limit,
	}
	if f.ID > 0 {
		stored.After, stored.Look = f.ID-1, 1
	}
	if f.Key != "" {
		stored.Lanes = []int{Lane(f.Key, "")}
	} else {
		for lane := range Lanes {
			stored.Lanes = append(stored.Lanes, lane)
		}
	}
	rows, err := o.store.ListWaiting(ctx, stored)
	if err != nil {
		return nil, fmt.Errorf("outbox: list waiting messages: %w", err)
	}
	all := make([]WaitingRow, len(rows))
	for i, r := range rows {
		all[i] = WaitingRow(r)
	}
	return all, nil
}
