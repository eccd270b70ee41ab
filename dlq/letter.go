package dlq

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// State is the state of a dead letter; see the package documentation.
type State string

// The states of a dead letter.
const (
	StateDead       State = "dead"
	StateHeld       State = "held"
	StateReplaying  State = "replaying"
	StateDiscarding State = "discarding"
	StateReplayed   State = "replayed"
	StateDiscarded  State = "discarded"
)

var states = []State{StateDead, StateHeld, StateReplaying, StateDiscarding, StateReplayed, StateDiscarded}

// Source is who wrote a dead letter.
type Source string

// The sources of dead letters.
const (
	FromRelay    Source = "relay"    // could not be published
	FromConsumer Source = "consumer" // could not be handled
)

// Letter is a dead letter: a message that was given up, and why. All times are the
// database's.
type Letter struct {
	ID      int64
	State   State
	Version int // grows with each change of the state
	Source  Source

	Consumer string // name of the consumer; empty if a relay wrote it
	Lane     int    // lane of the message; -1 if a consumer wrote it
	RowID    int64  // the message's id in the outbox; 0 if a consumer wrote it

	Topic     string
	MessageID string
	Key       string           // ordering key; empty for none
	Payload   []byte           // nil in a list
	Metadata  message.Metadata // nil in a list
	Size      int              // payload size in bytes
	CreatedAt time.Time        // when the message was written; zero if a foreign producer did not set it
	DiedAt    time.Time        // when it was given up

	// Reason is the class. Of relays: refused, unroutable, unanswered, malformed, crashed,
	// failed. Of inboxes: failed, permanent, unavailable, crashed, malformed, no-message-id,
	// conflict, unverified, older-than-retention.
	Reason string

	Error       string    // of the last attempt, with all wrapped errors
	Stack       string    // of a consumer's panic, or empty
	Tries       int       // attempts of a relay; failed deliveries of a consumer
	Attempts    []Attempt // the last ten; nil in a list
	TraceID     string    // W3C, 32 hexadecimal digits, or empty
	Fingerprint string    // the same for similar failures, see Fingerprint

	// MayHaveBeenDelivered reports that the message was refused for good after an
	// attempt of a relay whose answer was lost. The broker may have taken it then, and
	// a replay may deliver it again.
	MayHaveBeenDelivered bool

	Act      Act       // who replayed or discarded it, and why
	ActedAt  time.Time // zero until then
	ClosedAt time.Time // when it became replayed or discarded; zero until then
}

// Attempt is a failed attempt.
type Attempt struct {
	At    time.Time
	Class string
	Error string
}

// Cursor returns the position of the dead letter in a list; see [Filter.After].
func (l *Letter) Cursor() Cursor { return Cursor{DiedAt: l.DiedAt, ID: l.ID} }

type scanner interface{ Scan(dest ...any) error }

// scanLetter reads the columns of a list, and those of the message if whole is set.
func scanLetter(row scanner, whole bool) (*Letter, error) {
	l := &Letter{}
	var lane, rowID, created, acted, closed sql.NullInt64
	var died int64
	var attempts, metadata []byte
	dest := []any{
		&l.ID, &l.State, &l.Version, &l.Source, &l.Consumer, &lane, &rowID, &l.Topic, &l.MessageID, &l.Key,
		&l.Size, &created, &died, &l.Reason, &l.Error, &l.Stack, &l.Tries, &l.TraceID, &l.Fingerprint, &l.MayHaveBeenDelivered,
		&l.Act.By, &l.Act.Reason, &acted, &closed, &metadata,
	}
	if whole {
		dest = append(dest, &l.Payload, &attempts)
	}
	if err := row.Scan(dest...); err != nil {
		return nil, err
	}
	l.Lane, l.RowID = -1, rowID.Int64
	if lane.Valid {
		l.Lane = int(lane.Int64)
	}
	l.CreatedAt, l.DiedAt, l.ActedAt, l.ClosedAt = at(created), time.UnixMicro(died).UTC(), at(acted), at(closed)
	decoded, err := outboxstore.DecodeMetadata(metadata)
	if err == nil && l.TraceID == "" {
		l.TraceID = traceID(decoded)
	}
	if !whole {
		return l, nil
	}
	if err == nil { // a message may be dead because its metadata cannot be read
		l.Metadata = decoded
	}
	l.Attempts, err = decodeAttempts(attempts)
	return l, err
}

func at(micros sql.NullInt64) time.Time {
	if !micros.Valid {
		return time.Time{}
	}
	return time.UnixMicro(micros.Int64).UTC()
}

func decodeAttempts(encoded []byte) ([]Attempt, error) {
	var raw []struct {
		At    int64
		Class string
		Text  string
	}
	if err := json.Unmarshal(encoded, &raw); err != nil {
		return nil, fmt.Errorf("attempts of the letter: %w", err)
	}
	attempts := make([]Attempt, len(raw))
	for i, r := range raw {
		attempts[i] = Attempt{At: time.UnixMicro(r.At).UTC(), Class: r.Class, Error: r.Text}
	}
	return attempts, nil
}

// traceID reads the traceparent that tracing puts into a message (W3C Trace Context,
// section 3.2): version, trace, parent and flags. Anybody may have written it, so
// anything that is not a trace id is dropped.
func traceID(metadata message.Metadata) string {
	parent := metadata.Get("traceparent")
	if len(parent) < 55 || parent[2] != '-' || parent[35] != '-' {
		return ""
	}
	id := strings.ToLower(parent[3:35])
	if strings.Trim(id, "0123456789abcdef") != "" {
		return ""
	}
	return id
}
