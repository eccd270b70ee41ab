package dlqstore

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/text"
)

// Letter is a dead letter; see dlq.Letter for its fields.
type Letter struct {
	ID                   int64
	State                string
	Version              int
	Source               string
	Consumer             string
	Lane                 int   // -1 if a consumer wrote it
	RowID                int64 // 0 if a consumer wrote it
	Topic                string
	MessageID            string
	Key                  string
	Payload              []byte            // nil in a list
	Metadata             map[string]string // nil in a list, or if it cannot be read
	Size                 int
	CreatedAt            time.Time // zero if not known
	DiedAt               time.Time
	Reason               string
	Error                string
	Stack                string
	Tries                int
	Attempts             []Attempt // nil in a list
	TraceID              string
	Fingerprint          string
	MayHaveBeenDelivered bool
	ActedBy              string
	ActedReason          string
	ActedAt              time.Time // zero until then
	ClosedAt             time.Time // zero until then

	FailedAgain int64 // the dead letter of the replay, or 0; only of Get

	Edited   bool      // a replay delivers the edit
	EditedAt time.Time // zero if never edited; nil in a list, as the rest
	Edit     Edit      // the last one
}

// Edit is what a replay delivers in place of the message, and who made it.
type Edit struct {
	Payload    []byte
	Metadata   map[string]string
	By, Reason string
}

// Delivered returns the content that a replay delivers.
func (l *Letter) Delivered() (payload []byte, metadata map[string]string) {
	if l.Edited {
		return l.Edit.Payload, l.Edit.Metadata
	}
	return l.Payload, l.Metadata
}

// ReasonConflict is the class of a message that has the id of another one.
const ReasonConflict = "conflict"

// ReplayID returns the id of a replay: the id of its message, unless that had none, or had
// that of another message. Then the replay is a new message, whose copies all have the
// same id.
func (l *Letter) ReplayID() string {
	if l.Source == "consumer" && (l.MessageID == "" || l.Reason == ReasonConflict) {
		return "letter-" + strconv.FormatInt(l.ID, 10)
	}
	return l.MessageID
}

// Note is what somebody knows of a dead letter.
type Note struct {
	ID       int64
	At       time.Time
	By, Text string
}

// Attempt is a failed attempt.
type Attempt struct {
	At    time.Time
	Class string
	Error string
}

type scanner interface{ Scan(dest ...any) error }

// scanLetter reads the columns of a list, and those of the message if whole is set.
func scanLetter(row scanner, whole bool) (*Letter, error) {
	l := &Letter{}
	var lane, rowID, created, acted, closed sql.NullInt64
	var died int64
	var attempts, encoded, edited []byte
	var editedAt sql.NullInt64
	dest := []any{
		&l.ID, &l.State, &l.Version, &l.Source, &l.Consumer, &lane, &rowID, &l.Topic, &l.MessageID, &l.Key,
		&l.Size, &created, &died, &l.Reason, &l.Error, &l.Stack, &l.Tries, &l.TraceID, &l.Fingerprint, &l.MayHaveBeenDelivered,
		&l.ActedBy, &l.ActedReason, &acted, &closed, &encoded,
	}
	if whole {
		dest = append(dest, &l.Payload, &attempts, &l.Edited, &l.Edit.Payload, &edited, &editedAt, &l.Edit.By, &l.Edit.Reason)
	}
	if err := row.Scan(dest...); err != nil {
		return nil, err
	}
	l.Lane, l.RowID = -1, rowID.Int64
	if lane.Valid {
		l.Lane = int(lane.Int64)
	}
	l.CreatedAt, l.DiedAt, l.ActedAt, l.ClosedAt = at(created), time.UnixMicro(died).UTC(), at(acted), at(closed)
	metadata, _ := outboxstore.DecodeMetadata(encoded) // nil if it cannot be read, which may be why the message is dead
	if l.TraceID == "" {
		l.TraceID = traceID(metadata)
	}
	if !whole {
		return l, nil
	}
	l.Payload, l.Metadata, l.EditedAt = notNull(l.Payload), metadata, at(editedAt)
	if editedAt.Valid {
		var err error
		if l.Edit.Metadata, err = outboxstore.DecodeMetadata(edited); err != nil {
			return nil, err
		}
		l.Edit.Payload = notNull(l.Edit.Payload)
	}
	l.Attempts, _ = DecodeAttempts(attempts) // nil if another program wrote something else
	return l, nil
}

func at(micros sql.NullInt64) time.Time {
	if !micros.Valid {
		return time.Time{}
	}
	return time.UnixMicro(micros.Int64).UTC()
}

func encodeMetadata(metadata map[string]string) ([]byte, error) {
	if len(metadata) == 0 {
		return []byte{}, nil
	}
	return text.JSON(metadata)
}

// storedAttempt is an attempt as it is stored.
type storedAttempt struct {
	At    int64  `json:"at"`
	Class string `json:"class"`
	Text  string `json:"text"`
}

// DecodeAttempts decodes attempts as they are stored, in parked too. One with a time that JSON
// cannot hold, which only another program writes, is left out.
func DecodeAttempts(encoded []byte) ([]Attempt, error) {
	var stored []storedAttempt
	if err := json.Unmarshal(encoded, &stored); err != nil {
		return nil, fmt.Errorf("decode attempts: %w", err)
	}
	attempts := make([]Attempt, 0, len(stored))
	for _, s := range stored {
		if at := time.UnixMicro(s.At).UTC(); at.Year() >= 1970 && at.Year() < 9999 { // as an import takes
			attempts = append(attempts, Attempt{At: at, Class: s.Class, Error: s.Text})
		}
	}
	return attempts, nil
}

func encodeAttempts(attempts []Attempt) ([]byte, error) {
	stored := make([]storedAttempt, len(attempts))
	for i, a := range attempts {
		stored[i] = storedAttempt{At: a.At.UnixMicro(), Class: text.Clean(a.Class), Text: text.Clean(a.Error)}
	}
	return text.JSON(stored)
}

// traceID reads the traceparent that tracing puts into a message (W3C Trace Context,
// section 3.2): version, trace, parent and flags. Anybody may have written it, so
// anything that is not a trace id is dropped.
func traceID(metadata map[string]string) string {
	parent := metadata["traceparent"]
	if len(parent) < 55 || parent[2] != '-' || parent[35] != '-' {
		return ""
	}
	id := strings.ToLower(parent[3:35])
	if strings.Trim(id, "0123456789abcdef") != "" {
		return ""
	}
	return id
}

// micros returns a time that a producer gave, or nil for a time that no table can
// store.
func micros(t time.Time) any {
	if year := t.UTC().Year(); year < 1970 || year > 9999 { // includes the zero time
		return nil
	}
	return t.UnixMicro()
}
