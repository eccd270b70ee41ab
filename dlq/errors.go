package dlq

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound is returned for an id that no dead letter has. It may have been
	// purged; see Config.Retention.
	ErrNotFound = errors.New("no such letter")

	// ErrNoActor is returned for an Act without By. Nothing was done.
	ErrNoActor = errors.New("dlq: the act needs to say by whom")

	// ErrNoReason is returned for a discard without a reason. Nothing was done.
	ErrNoReason = errors.New("dlq: a discard needs a reason")
)

// StateError means that a dead letter was left alone because of its state: somebody has
// already acted on it.
type StateError struct {
	ID    int64
	State State  // current state
	Deed  string // refused action: "replayed" or "discarded"
}

func (e *StateError) Error() string {
	return fmt.Sprintf("dlq: letter %d cannot be %s: it is %s", e.ID, e.Deed, e.State)
}
