package relay

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Message is one owed message on its way to a sink. A sink must not change it.
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

	// Term, if it is not 0, is the number of the lane's pipeline: a new one begins
	// when all messages of the last one have their outcome, after a failure. When an
	// outage has cost a sink what it had of a term, it had better make unavailable
	// what else comes of that term, which the relay may have handed over before it
	// knew: sent now, it would overtake what is to be sent again.
	Term uint64

	entry *entry // what the worker knows of it
}

// Watermill returns m as a Watermill message. Payload and metadata are shared,
// not copied.
func (m *Message) Watermill() *message.Message {
	msg := message.NewMessage(m.MessageID, m.Payload)
	msg.Metadata = m.Metadata
	if msg.Metadata == nil {
		msg.Metadata = message.Metadata{}
	}
	return msg
}

// Sink is a way out: it hands messages to a broker and reports what became of
// each.
//
// A sink may have two more methods. MaxInFlight() int bounds the messages that it
// is handed before their outcomes, below Config.Window. Ready() bool says whether
// it reaches its broker: a worker whose sink does not, while another worker's
// does, leaves the lanes to that one.
type Sink interface {
	// Run holds the sink's connections and goroutines. It blocks until ctx
	// ends and then returns nil; an error means that the sink can never work
	// (bad credentials are not that: they may be mended while it runs). The
	// relay calls Run once, before the first Publish, and cancels ctx after
	// the last outcome it waits for.
	Run(ctx context.Context) error

	// Publish takes messages of one lane, in their order, and returns without
	// waiting for the broker. The sink reports one outcome for each message by
	// calling done, from any goroutine. done does not block.
	//
	//   - nil: the broker has confirmed the message.
	//   - An error that matches [ErrRefused]: this message cannot be taken,
	//     whatever the state of the broker.
	//   - One that matches [ErrInterrupted]: the sink has replaced what the lane
	//     publishes on. Nothing is known against the message, its topic or the
	//     broker.
	//   - One that matches [ErrUnavailable]: nothing is known against the message.
	//
	// ctx ends when the relay gives the lane up (its lease is lost, or the relay
	// stops), or when Config.PublishTimeout has passed since Publish was called. A
	// message that has no outcome by then is unavailable.
	//
	// A confirm counts however late it comes. After an outcome that matches
	// ErrUnavailable, the sink may call done(m, nil) once more, when it learns that
	// the broker has confirmed a copy of m after all. The relay then takes m as
	// delivered, even if it has handed m over again: that counts as the outcome of
	// the later copy too. After nil or a refusal, done is never called again for m.
	// The relay ignores every other second outcome. The confirm of a copy that was
	// returned as unroutable is no confirm.
	//
	// Messages of one key are never in flight together unless the order mode
	// says so; a sink that keeps the order of one lane's messages keeps every
	// promise of the relay. In OrderPerKeyPipelined a key can come out of order if
	// the sink sends more of a lane after one that was unavailable; heeding
	// Message.Term leaves this to what the broker has already. [FromPublisher] does
	// not heed it.
	Publish(ctx context.Context, msgs []*Message, done func(*Message, error))
}
