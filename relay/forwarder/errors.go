package forwarder

import (
	"errors"
	"fmt"
)

// ErrNoConsumerGroup is returned by [Intake.Run] when the offsets table does not contain
// the consumer group: its name is mistyped, or no forwarder has ever run with it. In the
// latter case set Config.FromStart.
var ErrNoConsumerGroup = errors.New("the forwarder's consumer group has no offset")

// EnvelopeError is returned by [Intake.Run] for a message that cannot be moved: it is not
// an envelope, or the outbox does not accept it (then errors.As finds the
// *outbox.MessageError). Nothing behind it moves. Correct or delete its row, or set
// Config.Reject.
type EnvelopeError struct {
	Topic     string // the forwarder's
	Offset    int64  // of the row
	MessageID string // of the envelope, the uuid of the row
	Err       error  // why
}

func (e *EnvelopeError) Error() string {
	return fmt.Sprintf("forwarder: row with offset %d (uuid %q) of the forwarder's topic %s cannot be moved: %v", e.Offset, e.MessageID, e.Topic, e.Err)
}

func (e *EnvelopeError) Unwrap() error { return e.Err }
