package dlq

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
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
	Reason      string // class
	Fingerprint string

	From  time.Time // died at or after; zero: any
	Until time.Time // died before; zero: any

	OldestFirst bool
	Limit       int    // Default: 100. At most 1000.
	After       Cursor // go on after this one: the Cursor of the last dead letter of the page before
}

// Cursor is a position in a list. Lists are ordered by the time of death, so dead
// letters written meanwhile do not move any other.
type Cursor struct {
	DiedAt time.Time
	ID     int64
}

const (
	defaultLimit = 100
	mostLimit    = 1000
)

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
	texts := s.texts.lists[f.driver()]
	text := texts[0]
	if f.OldestFirst {
		text = texts[1]
	}
	rows, err := s.db.QueryContext(ctx, text, f.Limit, s.texts.strings(f.States),
		string(f.Source), f.Consumer, f.Topic, f.Key, f.MessageID, f.Reason, f.Fingerprint,
		lower(f), upper(f), cursorMicros(f), f.After.ID)
	letters, err := scanLetters(rows, err)
	if err != nil {
		return nil, fmt.Errorf("dlq: list letters: %w", err)
	}
	return letters, nil
}

// driver returns the condition that admits the fewest dead letters.
func (f Filter) driver() string {
	switch {
	case f.MessageID != "":
		return "message_id"
	case f.Key != "":
		return "key"
	case f.Fingerprint != "":
		return "fingerprint"
	case len(f.States) == 1 && (f.States[0] == StateReplaying || f.States[0] == StateDiscarding): // it passes
		return "state"
	case f.Consumer != "":
		return "consumer"
	case f.Topic != "":
		return "topic"
	case len(f.States) == 1:
		return "state"
	}
	return "died_at"
}

// The years 1 and 9999, in microseconds since 1970.
const (
	firstMicros = -62135596800000000
	lastMicros  = 253402300799999999
)

func lower(f Filter) int64 {
	if f.From.IsZero() {
		return firstMicros
	}
	return f.From.UnixMicro()
}

func upper(f Filter) int64 {
	if f.Until.IsZero() {
		return lastMicros
	}
	return f.Until.UnixMicro()
}

// cursorMicros is where the list continues: before its start if there is no cursor.
func cursorMicros(f Filter) int64 {
	switch {
	case f.After != Cursor{}:
		return f.After.DiedAt.UnixMicro()
	case f.OldestFirst:
		return firstMicros
	}
	return lastMicros
}

func scanLetters(rows *sql.Rows, err error) ([]*Letter, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var letters []*Letter
	for rows.Next() {
		l, err := scanLetter(rows, false)
		if err != nil {
			return nil, err
		}
		letters = append(letters, l)
	}
	return letters, rows.Err()
}

func scanIDs(rows *sql.Rows, err error) ([]int64, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var ids []int64
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

func scanStates(rows *sql.Rows, err error) (map[int64]State, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	states := map[int64]State{}
	for rows.Next() {
		var id int64
		var state State
		if err := rows.Scan(&id, &state); err != nil {
			return nil, err
		}
		states[id] = state
	}
	return states, rows.Err()
}
