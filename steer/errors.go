package steer

import (
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/steerstore"
	"github.com/oncemill/oncemill/internal/text"
)

var (
	// ErrNoActor is returned for an Act without By. Nothing was done.
	ErrNoActor = errors.New("steer: Act.By is required")

	// ErrNoReason is returned for an act without Reason that requires one. Nothing was done.
	ErrNoReason = errors.New("steer: Act.Reason is required")

	// ErrTooMany is returned by Pause if 1,000 things are paused: every worker reads all of
	// them each second. Resume some. Nothing was done.
	ErrTooMany = steerstore.ErrTooMany

	// ErrNoAudit is returned for every act if the table of the audit does not exist. Nothing
	// was done. Pass audit.Migrations to oncemill.Migrate.
	ErrNoAudit = auditstore.ErrNotMigrated
)

// PausedError is returned by Pause for what is paused already. The pause is as it was.
type PausedError struct{ Pause }

func (e *PausedError) Error() string {
	return fmt.Sprintf("steer: %s is paused already, by %s since %s: %s", e.Target(), text.Quote(e.By, mostShown), e.Since.Format(time.RFC3339), text.Quote(e.Reason, mostShown))
}

// NotPausedError is returned by Resume for what is not paused. Nothing was done.
type NotPausedError struct{ Target }

func (e *NotPausedError) Error() string { return fmt.Sprintf("steer: %s is not paused", e.Target) }

// TargetError means that nothing can have this kind or name. Nothing was done.
type TargetError struct {
	Target
	Problem string
}

func (e *TargetError) Error() string { return fmt.Sprintf("steer: %s: %s", e.Target, e.Problem) }

// mostShown bounds a text in an error.
const mostShown = 100
