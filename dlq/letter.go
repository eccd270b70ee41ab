package dlq

import (
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/dlqstore"
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
	CreatedAt time.Time        `json:",omitzero"` // when the message was written; zero if a foreign producer did not set it
	DiedAt    time.Time        // when it was given up

	// Reason is the class of the failure. From relays: refused, unroutable, unanswered, malformed, crashed,
	// failed. From consumers: failed, permanent, unavailable, crashed, malformed,
	// no-message-id, conflict, unverified, older-than-retention.
	Reason string

	Error       string    // of the last attempt, with all wrapped errors
	Stack       string    // of a consumer's panic, or empty
	Tries       int       // attempts of a relay; failed deliveries of a consumer
	Attempts    []Attempt // the last ten; nil in a list
	TraceID     string    // W3C, 32 hexadecimal digits, or empty
	Fingerprint string    // the same for similar failures: texts may differ in ids and numbers

	// MayHaveBeenDelivered reports that the message was given up after an attempt of a relay
	// whose answer was lost, or was an error of unknown kind, or after a worker had lost its
	// lease, maybe during one. The broker may have taken it then, and a replay may deliver it
	// again. The mark stays through replays.
	MayHaveBeenDelivered bool

	Act      Act       // who replayed or discarded it, and why
	ActedAt  time.Time `json:",omitzero"` // zero until then
	ClosedAt time.Time `json:",omitzero"` // when it became replayed or discarded; zero until then

	// FailedAgain is the id of the dead letter that the replay of this one has become; 0 if
	// it has not failed, and in a list.
	FailedAgain int64

	Edited *Edited // last edit of the message; nil if there is none, and in a list
}

// Edited is an edit of the message of a dead letter, which itself stays as it is.
type Edited struct {
	Payload  []byte
	Metadata message.Metadata // of the whole message
	Act      Act              // who edited it, and why
	At       time.Time

	// InUse means that the edit is, or was, delivered. Otherwise the replay was discarded
	// and the dead letter restored.
	InUse bool
}

// Attempt is a failed attempt.
type Attempt struct {
	At    time.Time
	Class string
	Error string
}

// Cursor returns the position of the dead letter in a list; see [Filter.After].
func (l *Letter) Cursor() Cursor { return Cursor{DiedAt: l.DiedAt, ID: l.ID} }

func letterOf(l *dlqstore.Letter) *Letter {
	letter := &Letter{
		ID:        l.ID,
		State:     State(l.State),
		Version:   l.Version,
		Source:    Source(l.Source),
		Consumer:  l.Consumer,
		Lane:      l.Lane,
		RowID:     l.RowID,
		Topic:     l.Topic,
		MessageID: l.MessageID,
		Key:       l.Key,
		Payload:   l.Payload,
		Metadata:  l.Metadata,
		Size:      l.Size,
		CreatedAt: l.CreatedAt,
		DiedAt:    l.DiedAt,

		Reason:               l.Reason,
		Error:                l.Error,
		Stack:                l.Stack,
		Tries:                l.Tries,
		TraceID:              l.TraceID,
		Fingerprint:          l.Fingerprint,
		MayHaveBeenDelivered: l.MayHaveBeenDelivered,

		Act:      Act{By: l.ActedBy, Reason: l.ActedReason},
		ActedAt:  l.ActedAt,
		ClosedAt: l.ClosedAt,
	}
	letter.FailedAgain = l.FailedAgain
	if !l.EditedAt.IsZero() {
		letter.Edited = &Edited{
			Payload: l.Edit.Payload, Metadata: l.Edit.Metadata, Act: Act{By: l.Edit.By, Reason: l.Edit.Reason}, At: l.EditedAt, InUse: l.Edited,
		}
	}
	if l.Attempts != nil {
		letter.Attempts = make([]Attempt, 0, len(l.Attempts))
	}
	for _, a := range l.Attempts {
		letter.Attempts = append(letter.Attempts, Attempt(a))
	}
	return letter
}
