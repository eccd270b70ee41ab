package relay

import (
	"context"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
)

// Message is an unconfirmed message on its way to a sink. A sink must not change it.
type Message struct {
	// Lane and ID identify the row. Two messages may share a MessageID; no two
	// share (Lane, ID).
	Lane int
	ID   int64

	Topic     string
	MessageID string // Watermill's UUID
	Key       string // ordering key, empty for an unkeyed message
	Payload   []byte
	Metadata  message.Metadata
	CreatedAt time.Time // by the database's clock, at the insert

	// Term, if it is not 0, is the number of the lane's pipeline. After a failure, a
	// new term begins when all messages of the last one have their outcome. After an
	// outage has cost a sink messages of a term, it should report the rest of that term
	// as unavailable. The relay may have handed them over before it knew; sent now,
	// they would overtake the retry.
	Term uint64

	entry *entry // the worker's state of it
}

// SameRow reports whether m and o are the same row. A message that is handed to a sink again is another
// [Message], and its row may have been read twice. The ID alone is not enough: after a failover ids may be
// assigned again.
func (m *Message) SameRow(o *Message) bool {
	return m == o || m.Lane == o.Lane && m.ID == o.ID && m.MessageID == o.MessageID && m.Topic == o.Topic && m.CreatedAt.Equal(o.CreatedAt)
}

// Watermill returns m as a Watermill message. The payload is shared, not copied. The metadata
// is a copy with [outbox.CreatedAtMetadata], from which consumers measure how long a message
// took.
func (m *Message) Watermill() *message.Message {
	msg := message.NewMessage(m.MessageID, m.Payload)
	maps.Copy(msg.Metadata, m.Metadata)
	if !m.CreatedAt.IsZero() {
		msg.Metadata[outbox.CreatedAtMetadata] = m.CreatedAt.UTC().Format(time.RFC3339Nano)
	}
	return msg
}

// Sink hands messages to a broker and reports the outcome of each.
//
// A sink may have two more methods. MaxInFlight() int bounds the number of messages
// handed to it without an outcome, below Config.Window: at least 1, and always the same.
// Ready() bool reports whether it reaches its broker. A worker whose sink does not, while
// another worker's does, leaves the lanes to that one.
type Sink interface {
	// Run holds the sink's connections and goroutines. It blocks until ctx ends and
	// then returns nil. An error means that the sink can never work; bad credentials
	// are not such a case, as they may be fixed while it runs. The relay calls Run
	// once, before the first Publish, and cancels ctx after the last outcome it waits
	// for.
	Run(ctx context.Context) error

	// Publish takes messages of one lane, in their order, and returns without waiting
	// for the broker. The sink reports one outcome for each message by calling done,
	// from any goroutine. done does not block.
	//
	//   - nil: the broker has confirmed the message.
	//   - An error that matches [ErrRefused]: this message cannot be taken,
	//     whatever the state of the broker.
	//   - One that matches [ErrInterrupted]: the sink has replaced what the lane
	//     publishes on. The message, its topic and the broker are not blamed.
	//   - One that matches [ErrUnavailable]: the message is not blamed.
	//
	// ctx ends when the relay gives up the lane (its lease is lost, or the relay
	// stops), or when Config.PublishTimeout has passed since Publish was called. A
	// message that has no outcome by then is unavailable.
	//
	// A confirm counts however late it comes. After an outcome that matches
	// ErrUnavailable, the sink may call done(m, nil) once more, when it learns that the
	// broker has confirmed a copy of m after all. The relay then takes m as delivered,
	// even if it has handed m over again: that counts as the outcome of the later copy
	// too. After nil or a refusal, done is never called again for m. The relay ignores
	// every other second outcome. The confirm of a copy that was returned as unroutable
	// is no confirm.
	//
	// Messages of one key are never in flight together unless the order mode permits
	// it. A sink that keeps the order of one lane's messages keeps every guarantee of
	// the relay. In OrderPerKeyPipelined a key can get out of order if the sink sends
	// more of a lane after an unavailable message. Respecting Message.Term limits this
	// to what the broker already has. [FromPublisher] does not respect it.
	Publish(ctx context.Context, msgs []*Message, done func(*Message, error))
}
