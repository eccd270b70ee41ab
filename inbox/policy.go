package inbox

import (
	"errors"
	"time"
)

// Permanent marks an error that another attempt cannot fix: the message becomes a dead
// letter at once. Without Config.DeadLetters the mark ends the attempts of this delivery.
// Permanent(nil) is nil. The mark is found through any wrapping.
func Permanent(err error) error { return mark(err, policy{permanent: true}) }

// RetryAfter marks an error after which the message should not be tried again before d has
// passed. It ends the attempts of this delivery and counts as a failed delivery.
func RetryAfter(err error, d time.Duration) error { return mark(err, policy{after: max(d, 1)}) }

// Unavailable marks an error that is not the message's fault: something that the handler
// depends on is unavailable (an open circuit, a refused connection). It uses up no
// attempt, and delays the message and its key. If messages of three keys fail this way and
// none is handled for half a second, the inbox stops handling messages. It then lets one
// through from time to time, and resumes when that one does not fail in this way. A
// message that keeps failing this way while others are handled becomes a dead letter
// (Retry.Unavailable).
func Unavailable(err error) error { return mark(err, policy{unavailable: true}) }

// policy is the content of a mark.
type policy struct {
	permanent   bool
	after       time.Duration
	unavailable bool
}

// markedError adds a policy to an error; the text stays that of the error.
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

// policyOf returns the policy of the outermost mark of err.
func policyOf(err error) policy {
	var marked *markedError
	if errors.As(err, &marked) {
		return marked.policy
	}
	return policy{}
}
