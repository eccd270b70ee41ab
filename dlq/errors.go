package dlq

import (
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

var (
	// ErrNotFound is returned for an id that no dead letter has. It may have been
	// purged; see Config.Retention.
	ErrNotFound = dlqstore.ErrNotFound

	// ErrNoActor is returned for an Act without By. Nothing was done.
	ErrNoActor = errors.New("dlq: Act.By is required")

	// ErrNoReason is returned for an act without Reason that requires one. Nothing was done.
	ErrNoReason = errors.New("dlq: Act.Reason is required")

	// ErrNoAudit is returned for every act if the table of the audit does not exist. Nothing
	// was done. Pass audit.Migrations to oncemill.Migrate.
	ErrNoAudit = auditstore.ErrNotMigrated
)

const restored = "restored" // a StateError.Action

// StateError means that a dead letter was left alone because of its state: somebody has
// already acted on it, or, for Restore, has not, or its message was removed.
type StateError struct {
	ID     int64
	State  State  // current state
	Action string // refused action: "replayed", "edited", "discarded" or "restored"
}

func (e *StateError) Error() string {
	if e.Action == restored && e.State == StateDiscarded {
		return fmt.Sprintf("dlq: dead letter %d cannot be restored: its relay has removed the message, or it was imported", e.ID)
	}
	return fmt.Sprintf("dlq: dead letter %d cannot be %s: its state is %s", e.ID, e.Action, e.State)
}

// EditError means that the message of a dead letter cannot be edited, or not in this way.
// Nothing was done.
type EditError struct {
	ID      int64
	Problem string
}

func (e *EditError) Error() string {
	return fmt.Sprintf("dlq: dead letter %d cannot be edited: %s", e.ID, e.Problem)
}

// LineError means that a line of an import was not imported.
type LineError struct {
	Line int // from 1
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("dlq: line %d: %v", e.Line, e.Err) }

// Unwrap returns what is wrong with the line.
func (e *LineError) Unwrap() error { return e.Err }

// JobStateError means that a job was left alone because of its state.
type JobStateError struct {
	ID     int64
	State  JobState // current state
	Action string   // refused action: "paused", "resumed" or "canceled"
}

func (e *JobStateError) Error() string {
	return fmt.Sprintf("dlq: job %d cannot be %s: it is %s", e.ID, e.Action, e.State)
}
