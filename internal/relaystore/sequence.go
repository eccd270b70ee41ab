package relaystore

import (
	"context"
	"fmt"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// Outbox gives out the ids.
type Outbox interface {
	// LastID returns the last id that was given out.
	LastID(ctx context.Context) (int64, error)

	// RepairSequence sets the sequence above every id in use in the outbox and its history,
	// and above floor. It returns the last id given out.
	RepairSequence(ctx context.Context, floor int64) (int64, error)
}

// CheckSequences returns [outboxstore.ErrSequenceBehind] if the outbox would give out
// ids that retrying messages or dead letters have, or if dead letters would get ids that
// are in use.
func CheckSequences(ctx context.Context, s Sequences, box Outbox) error {
	highest, err := s.HighestID(ctx)
	if err != nil {
		return err
	}
	last, err := box.LastID(ctx) // later: ids only grow
	if err != nil {
		return err
	}
	if last < highest {
		return fmt.Errorf("%w (last id given out %d, highest id retrying or in dead letters %d)", outboxstore.ErrSequenceBehind, last, highest)
	}
	behind, err := s.DeadLettersBehind(ctx)
	if err != nil {
		return err
	}
	if behind {
		return fmt.Errorf("%w (that of the dead letters)", outboxstore.ErrSequenceBehind)
	}
	return nil
}

// RepairSequences sets the sequences above every id in use, in the outbox, its history,
// retrying messages and dead letters. It returns the last id of the outbox given out.
func RepairSequences(ctx context.Context, s Sequences, box Outbox) (last int64, err error) {
	if err := s.RepairDeadLetters(ctx); err != nil {
		return 0, err
	}
	for last = -1; ; {
		floor, err := s.HighestID(ctx)
		if err != nil {
			return 0, err
		}
		if floor <= last {
			return last, nil
		}
		// A row may leave the outbox between this check and the lock on it, so there is
		// a second check after it.
		if last, err = box.RepairSequence(ctx, floor); err != nil {
			return 0, err
		}
	}
}
