package dlq

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

// Filter selects the dead letters to list. Empty fields match everything. The zero
// value lists the newest of all.
type Filter struct {
	States      []State
	Source      Source
	Consumer    string
	Topic       string
	Key         string
	MessageID   string
	Reason      string // see Letter.Reason
	Fingerprint string

	From  time.Time // died at or after; zero: any
	Until time.Time // died before; zero: any

	OldestFirst bool
	Limit       int    // Default: 100. At most 1000.
	After       Cursor // where the page begins: the Cursor of the last dead letter of the previous page
}

// Cursor is a position in a list. Lists are ordered by DiedAt, so dead letters that are
// written meanwhile do not move others.
type Cursor struct {
	DiedAt time.Time
	ID     int64
}

const (
	defaultLimit = 100
	mostLimit    = 1000
)

// Now returns the time of the database's clock, which Letter.DiedAt comes from. Compute
// Filter.From and Filter.Until from it.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	now, err := s.store.Now(ctx)
	if err != nil {
		return time.Time{}, fmt.Errorf("dlq: read time: %w", err)
	}
	return now, nil
}

// List returns dead letters without their payload, metadata and attempts (see Get). It
// uses an index for each of message id, key, fingerprint, consumer, topic, a single
// state, and time. A filter by source, reason or several states alone reads all dead
// letters until it has found enough: where many are closed, list the states one by one.
// A bad Limit is an [*oncemill.ConfigError].
func (s *Store) List(ctx context.Context, f Filter) ([]*Letter, error) {
	switch {
	case f.Limit == 0:
		f.Limit = defaultLimit
	case f.Limit < 0 || f.Limit > mostLimit:
		return nil, &oncemill.ConfigError{Field: "dlq.Filter.Limit", Value: strconv.Itoa(f.Limit), Problem: "must be 1 to " + strconv.Itoa(mostLimit) + ", or 0 for " + strconv.Itoa(defaultLimit)}
	}
	for _, state := range f.States {
		if !slices.Contains(states, state) {
			return nil, &oncemill.ConfigError{Field: "dlq.Filter.States", Value: strconv.Quote(string(state)), Problem: "must be dead, held, replaying, discarding, replayed or discarded"}
		}
	}
	filter := dlqstore.Filter{
		Source: string(f.Source), Consumer: f.Consumer, Topic: f.Topic, Key: f.Key, MessageID: f.MessageID,
		Reason: f.Reason, Fingerprint: f.Fingerprint, From: f.From, Until: f.Until,
		OldestFirst: f.OldestFirst, Limit: f.Limit, AfterDiedAt: f.After.DiedAt, AfterID: f.After.ID,
	}
	for _, state := range f.States {
		filter.States = append(filter.States, string(state))
	}
	found, err := s.store.List(ctx, filter)
	if err != nil {
		return nil, fmt.Errorf("dlq: list dead letters: %w", err)
	}
	var letters []*Letter
	for _, l := range found {
		letters = append(letters, letterOf(l))
	}
	return letters, nil
}
