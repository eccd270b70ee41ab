package inbox

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/lent"
)

// Tx is the transaction of one attempt to handle a message, as its handler sees it:
// statements and savepoints, but no way to end it. It works as sqlc's DBTX and as the
// transaction that outbox.Publisher takes.
//
// Commit and Rollback do nothing and return oncemill.ErrTxOwned, so a deferred Rollback is
// harmless. Return nil to commit and an error to roll back. SQL text that ends the
// transaction is not sent: it returns oncemill.ErrTxOwned and fails the attempt. After the
// handler has returned, every method fails with [ErrTxEnded].
//
// On PostgreSQL, set constraints all immediate fails; name the constraints instead.
type Tx interface {
	oncemill.Tx
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// TxFromContext returns the transaction in which a message is being handled. ctx is the
// context of that message, or derived from it. oncemill.TxFromContext returns the same
// transaction there, so a context-bound outbox publisher writes in it.
func TxFromContext(ctx context.Context) (Tx, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	h, ok := tx.(*handle)
	return h, ok
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

// handle lends the transaction of an inbox, which tells it from those of others.
type handle struct {
	*lent.Handle
	msg *message.Message // nil for a batch
}

// lend returns a handle on the transaction that has claimed an id.
func (in *Inbox) lend(id string, tx *boundtx.Tx, statements lent.Statements) *handle {
	return &handle{Handle: lent.New(tx, statements, in.cfg.Database.Dialect, ErrTxEnded, func(ctx context.Context, err error) error {
		return in.store.EndedBy(ctx, tx.Raw, id, err)
	})}
}
