package relay

import (
	"errors"
	"fmt"
)

var (
	// ErrRefused matches every outcome that says: this message cannot be
	// delivered, whatever the state of the broker. It costs an attempt.
	// A sink makes one with [Refused].
	ErrRefused = errors.New("message refused")

	// ErrUnavailable matches every outcome that says: the broker, the
	// connection or the queue cannot take messages now. It costs nothing; the
	// lane waits and tries again. A sink makes one with [Unavailable].
	ErrUnavailable = errors.New("sink unavailable")

	// ErrUnroutable matches a refusal that says: the broker has nobody to give
	// this message to. If the other messages of its topic pass, it counts as
	// refused; if they do not, the topic's queues are missing, and all wait
	// without being charged. A sink makes one with [NoRoute].
	ErrUnroutable = errors.New("message unroutable")
)

// Refused marks err as the refusal of one message: too large, not to be
// marshalled, unroutable. Refused(nil) is nil.
func Refused(err error) error { return mark(ErrRefused, err) }

// Unavailable marks err as an outage: connection lost, time out, nack, blocked
// broker. Unavailable(nil) is nil.
func Unavailable(err error) error { return mark(ErrUnavailable, err) }

// NoRoute marks err as ErrUnroutable, and as ErrRefused. NoRoute(nil) is nil.
func NoRoute(err error) error { return Refused(mark(ErrUnroutable, err)) }

func mark(kind, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", kind, err)
}
