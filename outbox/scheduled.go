package outbox

import (
	"context"
	"fmt"

	"github.com/oncemill/oncemill"
)

// CancelScheduled removes the scheduled messages with an id that are not yet due, in
// the caller's transaction, and reports whether there were any. False means that there
// is nothing to cancel: the message is in the outbox or delivered, or was never
// scheduled.
//
// While tx is open, due messages with this id, and of the same key, wait for it. The
// result is final when tx commits: end it soon. For a nil tx the error is [ErrNoTx].
func (o *Outbox) CancelScheduled(ctx context.Context, tx oncemill.ExecTx, messageID string) (bool, error) {
	if isNil(tx) {
		return false, ErrNoTx
	}
	n, err := o.store.Cancel(ctx, tx, messageID)
	if err != nil {
		return false, fmt.Errorf("outbox: cancel scheduled: %w", err)
	}
	return n > 0, nil
}
