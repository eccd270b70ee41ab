package dlq

import (
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/internal/dlqstore"
)

var (
	// ErrNotFound is returned for an id that no dead letter has. It may have been
	// purged; see Config.Retention.
	ErrNotFound = dlqstore.ErrNotFound

	// ErrNoActor is returned for an Act without By. Nothing was done.
	ErrNoActor = errors.New("dlq: Act.By is required")

	// ErrNoReason is returned for a discard without a reason. Nothing was done.
	ErrNoReason = errors.New("dlq: Act.Reason is required to discard")
)

// StateError means that a dead letter was left alone because of its state: somebody has
// already acted on it.
type StateError struct {
	ID     int64
	State  State  // current state
	Action string // refused action: "replayed" or "discarded"
}

func (e *StateError) Error() string {
	return fmt.Sprintf("dlq: dead letter %d cannot be %s: its state is %s", e.ID, e.Action, e.State)
}
