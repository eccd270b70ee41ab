package inbox

import (
	"errors"
	"time"
)

// Permanent marks an error that no further attempt will mend: the message becomes
// a dead letter at once. Without Config.DeadLetters the mark ends the attempts of
// this delivery. nil stays nil. It is found through any wrapping.
func Permanent(err error) error { return mark(err, policy{permanent: true}) }

// RetryAfter marks an error after which the message should not be tried before d
// has passed. It ends the attempts of this delivery and counts as a failed one.
func RetryAfter(err error, d time.Duration) error { return mark(err, policy{after: max(d, 1)}) }

// Unavailable marks an error that says nothing about the message: something that
// the handler depends on is away (an open circuit, a refused connection). It is
// no attempt, and delays the message with its key. If messages of three keys say so and
// for half a second none is handled, the inbox stops handling messages, lets one through
// from time to time, and goes on when that one does not fail in this way. A message that
// says so again and again while others are handled becomes a dead letter
// (Retry.Unavailable).
func Unavailable(err error) error { return mark(err, policy{unavailable: true}) }

// policy is what a mark says.
type policy struct {
	permanent   bool
	after       time.Duration
	unavailable bool
}

// markedError carries a policy; its text is that of the error.
type markedError struct {
	error
	policy policy
}

func (e *markedError) Unwrap() error { return e.error }

func mark(err error, p policy) error {
	if err == nil {
		return nil
	}
	return &markedError{error: err, policy: p}
}

// policyOf returns what the outermost mark of err says.
func policyOf(err error) policy {
	var marked *markedError
	if errors.As(err, &marked) {
		return marked.policy
	}
	return policy{}
}
