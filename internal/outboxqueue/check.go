package outboxqueue

import (
	"context"
	"fmt"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox"
)

// Check returns [outbox.ErrSequenceBehind] or [outbox.ErrSequenceCached] if the outbox
// would give out ids that break the order of keys. It returns [outbox.ErrReadOnly] if a
// PostgreSQL server accepts no writes, and a *oncemill.SchemaError if the tables are not
// migrated. A relay publishes nothing until it passes.
func (q *Queue) Check(ctx context.Context) error {
	if err := oncemill.CheckMigrated(ctx, q.box.DB(), q.box.Config().Database, outbox.Migrations); err != nil {
		return err
	}
	seq, err := q.store.Sequence(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("check id sequence: %w", err)
	case seq.Standby:
		return fmt.Errorf("%w (it is a standby)", outbox.ErrReadOnly)
	case seq.ReadOnly:
		return fmt.Errorf("%w (default_transaction_read_only is on)", outbox.ErrReadOnly)
	case seq.Cache > 1:
		return fmt.Errorf("%w (cache %d)", outbox.ErrSequenceCached, seq.Cache)
	case seq.Last < seq.Highest:
		return fmt.Errorf("%w (last id given out %d, highest id in use %d)", outbox.ErrSequenceBehind, seq.Last, seq.Highest)
	case seq.ScheduledBehind:
		return fmt.Errorf("%w (that of the scheduled messages)", outbox.ErrSequenceBehind)
	}
	forged, err := q.store.Forged(ctx)
	if err != nil {
		return fmt.Errorf("look for forged ids: %w", err)
	}
	for _, r := range forged { // they are delivered like all others
		q.log.WarnContext(ctx, "row with a forged id ignored by the check of the sequence; somebody wrote an id of their choice",
			"lane", r.Lane, "id", r.ID, "message_id", text.Shorten(r.MessageID))
	}
	return nil
}
