package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
)

// Tx is the transaction of one attempt to handle a message, as its handler sees
// it: statements and savepoints, but no end. It fits where sqlc wants a DBTX and
// where outbox.Publisher wants a transaction.
//
// Commit and Rollback do nothing and return oncemill.ErrTxOwned, so a deferred
// Rollback is harmless; return nil to commit and an error to roll back. SQL text
// that ends the transaction is not sent: it returns oncemill.ErrTxOwned and fails
// the attempt. After the handler has returned every method fails with
// [ErrTxEnded].
//
// On PostgreSQL, set constraints all immediate fails; name the constraints.
type Tx interface {
	oncemill.Tx
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// TxFromContext returns the transaction in which a message is being handled.
// ctx is the context of that message, or derived from it. It is what
// oncemill.TxFromContext returns there, so a context-bound outbox publisher
// writes in the same transaction.
func TxFromContext(ctx context.Context) (Tx, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	h, ok := tx.(*handle)
	return h, ok
}

// handle lends a transaction to a handler.
type handle struct {
	store   store
	dialect oncemill.Dialect
	id      messageID
	tx      *sql.Tx

	mu     sync.Mutex
	closed error // what every statement gets from now on; nil while lent
}

func (h *handle) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := h.admit(query); err != nil {
		return nil, err
	}
	result, err := h.tx.ExecContext(ctx, query, args...)
	return result, h.judge(ctx, err)
}

func (h *handle) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := h.admit(query); err != nil {
		return nil, err
	}
	rows, err := h.tx.QueryContext(ctx, query, args...)
	return rows, h.judge(ctx, err)
}

func (h *handle) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	err := h.admit(query)
	if err == nil {
		row := h.tx.QueryRowContext(ctx, query, args...)
		if err = row.Err(); err == nil {
			return row
		}
		err = h.judge(ctx, err)
	}
	// Only database/sql can make a row that has nothing but an error: that of a
	// context that has ended before anything is sent.
	return h.tx.QueryRowContext(newEnded(err), "") //nolint:contextcheck // it is not for a statement
}

func (h *handle) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	if err := h.admit(query); err != nil {
		return nil, err
	}
	stmt, err := h.tx.PrepareContext(ctx, query)
	return stmt, h.judge(ctx, err)
}

func (h *handle) Commit() error   { return oncemill.ErrTxOwned }
func (h *handle) Rollback() error { return oncemill.ErrTxOwned }

// admit refuses a statement that must not be sent.
func (h *handle) admit(query string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed == nil && endsTransaction(h.dialect, query) {
		h.closed = oncemill.ErrTxOwned
	}
	return h.closed
}

// judge closes the handle if the failed statement took the transaction with it,
// so that nothing is executed outside of it, and returns the error that the
// handler gets.
func (h *handle) judge(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	}
	if lost := h.store.lost(ctx, h.tx, h.id, err); lost != nil {
		_ = h.close(lost) // closed before by another goroutine: that reason stands
		return lost
	}
	return err
}

// close makes the handle refuse everything with reason. If it was closed before,
// its own reason stands and is returned.
func (h *handle) close(reason error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return h.closed
	}
	h.closed = reason
	return nil
}

// ended is a context that has ended with an error of ours.
type ended struct {
	done chan struct{}
	err  error
}

func newEnded(err error) ended {
	c := ended{done: make(chan struct{}), err: err}
	close(c.done)
	return c
}

func (c ended) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c ended) Done() <-chan struct{}       { return c.done }
func (c ended) Err() error                  { return c.err }
func (c ended) Value(any) any               { return nil }
