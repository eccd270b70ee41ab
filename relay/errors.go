package relay

import (
	"errors"
	"fmt"
)

var (
	// ErrRefused matches every outcome that means: this message cannot be delivered,
	// whatever the state of the broker. It uses up an attempt. A sink makes one with
	// [Refused].
	ErrRefused = errors.New("message refused")

	// ErrUnavailable matches every outcome that means: the broker, the connection or
	// the queue cannot take messages now. It uses up no attempt; the lane waits and
	// tries again. A sink makes one with [Unavailable].
	ErrUnavailable = errors.New("sink unavailable")

	// ErrInterrupted matches outcomes of messages whose sink has replaced what their
	// lane publishes on, for example an AMQP channel. The messages, their topic and the
	// broker are not blamed: the lane tries again, and no circuit opens. Such an
	// outcome also matches ErrUnavailable. A sink makes one with [Interrupted].
	ErrInterrupted = errors.New("publishing interrupted")

	// ErrUnroutable matches a refusal that means: the broker has no receiver for this
	// message. If other messages of its topic are confirmed, it uses up an attempt. If
	// none is, the topic's queues are missing, and its messages wait without using up
	// attempts. See Config.DropUnroutable for topics that may have no subscriber. A sink
	// makes one with [Unroutable].
	ErrUnroutable = errors.New("message unroutable")
)

// ErrNotRunning is returned by [Relay.Ready] while no Run is active.
var ErrNotRunning = errors.New("relay: not running")

// ErrStillRunning is returned by [Relay.Run] if something did not end within
// Config.StopTimeout and a second after its context: a sink, a function of the
// configuration, or a call of the database driver. It was left running. The messages in
// flight stay in the outbox and are sent again.
var ErrStillRunning = errors.New("relay: stopped, but something has not returned")

// Refused marks err as the refusal of one message, for example because it is too large
// or cannot be marshaled. Refused(nil) is nil.
func Refused(err error) error { return mark(ErrRefused, err) }

// Unavailable marks err as an outage: connection lost, timeout, nack, blocked broker.
// Unavailable(nil) is nil.
func Unavailable(err error) error { return mark(ErrUnavailable, err) }

// Interrupted marks err as ErrInterrupted and ErrUnavailable. Interrupted(nil) is nil.
func Interrupted(err error) error { return Unavailable(mark(ErrInterrupted, err)) }

// Unroutable marks err as ErrUnroutable and ErrRefused. Unroutable(nil) is nil.
func Unroutable(err error) error { return Refused(mark(ErrUnroutable, err)) }

func mark(kind, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", kind, err)
}
