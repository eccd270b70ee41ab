package inbox

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/txhandle"
)

// TxFromContext returns the transaction in which a message is being handled: it commits if
// the handler returns nil, and rolls back if it returns an error. After the handler has
// returned, statements fail with [ErrTxEnded]. ctx is the context of that message, or
// derived from it. oncemill.TxFromContext returns the same transaction there, so a
// context-bound outbox publisher writes in it.
func TxFromContext(ctx context.Context) (oncemill.Tx, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	if h, ok := tx.(*handle); ok {
		return h, true
	}
	return nil, false
}

// MessageFromContext returns the message that is being handled, with its id (UUID), its key
// and its metadata: for typed handlers, which get only what it contains. ctx is the context
// of that message, or derived from it. In a handler of Batch there is none.
func MessageFromContext(ctx context.Context) (*message.Message, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	h, ok := tx.(*handle)
	if !ok || h.msg == nil {
		return nil, false
	}
	return h.msg, true
}

// Attempt is one run of a handler for a message.
type Attempt struct {
	// Delivery is 1 plus the number of deliveries that count as failed (see
	// Retry.Deliveries and Retry.Unavailable). It needs a subscriber that reports a
	// [Delivery]; without, it is 1.
	Delivery int

	// Try is 1 plus the number of attempts of this delivery that have failed.
	Try int

	// Last reports whether the message becomes a dead letter if this attempt fails, unless
	// the error is marked with [Unavailable]. A message may become a dead letter without a
	// last attempt: after an error marked with [Permanent] or [RetryAfter], or after
	// crashes.
	Last bool
}

// AttemptFromContext returns which attempt at its message a handler is. ctx is the context
// of that message, or derived from it. In a handler of Batch there is none.
func AttemptFromContext(ctx context.Context) (Attempt, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	h, ok := tx.(*handle)
	if !ok || h.msg == nil {
		return Attempt{}, false
	}
	return h.attempt, true
}

// handle is the transaction of an inbox, as its type shows.
type handle struct {
	*txhandle.Handle
	msg     *message.Message // nil for a batch
	attempt Attempt
}

// newHandle returns a handle of the transaction that has claimed an id.
func (in *Inbox) newHandle(id string, tx *boundtx.Tx, statements txhandle.Statements) *handle {
	return &handle{Handle: txhandle.New(tx, statements, in.cfg.Database.Dialect, ErrTxEnded, func(ctx context.Context, err error) error {
		return in.store.EndedBy(ctx, tx.Raw, id, err)
	})}
}
