package dlq

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound is returned for an id that no letter has. It may have been
	// forgotten; see Config.Retention.
	ErrNotFound = errors.New("no such letter")

	// ErrNoActor is returned for an Act that does not say who acts. Nothing was
	// done.
	ErrNoActor = errors.New("dlq: the act needs to say by whom")

	// ErrNoReason is returned for a discard without a reason. Nothing was done.
	ErrNoReason = errors.New("dlq: a discard needs a reason")
)

// StateError means that a letter was left alone because of its state: somebody
// has acted on it already.
type StateError struct {
	ID    int64
	State State  // that it is in
	Deed  string // that was refused: "replayed" or "discarded"
}

func (e *StateError) Error() string {
	return fmt.Sprintf("dlq: letter %d cannot be %s: it is %s", e.ID, e.Deed, e.State)
}
