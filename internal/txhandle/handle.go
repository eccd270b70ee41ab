// Package txhandle gives a handler a transaction that it cannot end.
package txhandle

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
)

// Handle is a transaction as a handler sees it: statements and savepoints, but no end. It
// is an oncemill.Tx.
type Handle struct {
	own     *boundtx.Tx
	tx      Statements
	dialect oncemill.Dialect
	ended   error
	lost    func(ctx context.Context, err error) error

	mu     sync.Mutex
	shared error // refuses changes of settings; nil: they are allowed
	used   bool
	closed error // refuses every statement; nil while the handler runs
}

// New returns a handle of own that executes through tx. A statement that does not return
// although its context or the transaction has ended is abandoned. ended is the error of a
// statement after the end of the transaction. lost returns the error for the handler if a
// failed statement also ended the transaction, else nil.
func New(own *boundtx.Tx, tx Statements, dialect oncemill.Dialect, ended error, lost func(ctx context.Context, err error) error) *Handle {
	return &Handle{own: own, tx: tx, dialect: dialect, ended: ended, lost: lost}
}

// Share makes the handle refuse statements that change settings, since they would affect
// the other handlers of the transaction. Such a statement closes the handle with reason.
// Call Share before the handler runs.
func (h *Handle) Share(reason error) { h.shared = reason }

// ExecContext is that of *sql.Tx.
func (h *Handle) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := h.admit(query); err != nil {
		return nil, err
	}
	result, err := boundtx.Wait(ctx, h.own, func() (sql.Result, error) { return h.tx.ExecContext(ctx, query, args...) })
	return result, h.judge(ctx, err)
}

// QueryContext is that of *sql.Tx.
func (h *Handle) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := h.admit(query); err != nil {
		return nil, err
	}
	rows, err := boundtx.Wait(ctx, h.own, func() (*sql.Rows, error) { return h.tx.QueryContext(ctx, query, args...) })
	return rows, h.judge(ctx, err)
}

// QueryRowContext is that of *sql.Tx.
func (h *Handle) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	err := h.admit(query)
	if err == nil {
		var row *sql.Row
		row, err = boundtx.Wait(ctx, h.own, func() (*sql.Row, error) {
			row := h.tx.QueryRowContext(ctx, query, args...)
			return row, row.Err()
		})
		if err == nil {
			return row
		}
		err = h.judge(ctx, err)
	}
	return failedRow(h.own.Raw, err) //nolint:contextcheck // it is not for a statement
}

// failedRow returns a row with an error and no values. Only database/sql can make one: for
// a context that has ended before anything is sent.
func failedRow(tx Statements, err error) *sql.Row {
	return tx.QueryRowContext(newEnded(err), "")
}

// PrepareContext is that of *sql.Tx.
func (h *Handle) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	if err := h.admit(query); err != nil {
		return nil, err
	}
	stmt, err := boundtx.Wait(ctx, h.own, func() (*sql.Stmt, error) { return h.tx.PrepareContext(ctx, query) })
	return stmt, h.judge(ctx, err)
}

// Wraps reports whether h is a handle of tx. Package turn uses it to find nested
// transactions.
func (h *Handle) Wraps(tx *sql.Tx) bool { return h.own.Raw == tx }

// Commit does nothing and returns oncemill.ErrTxOwned.
func (h *Handle) Commit() error { return oncemill.ErrTxOwned }

// Rollback does nothing and returns oncemill.ErrTxOwned.
func (h *Handle) Rollback() error { return oncemill.ErrTxOwned }

// admit refuses statements that must not be sent.
func (h *Handle) admit(queries ...string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = h.used || len(queries) > 0
	for _, query := range queries {
		switch {
		case h.closed != nil:
			return h.closed
		case endsTransaction(h.dialect, query):
			h.closed = oncemill.ErrTxOwned
		case h.shared != nil && reachesOthers(h.dialect, query):
			h.closed = h.shared
		}
	}
	return h.closed
}

// Used reports whether the handler has executed any statement, or tried to.
func (h *Handle) Used() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.used
}

// judge returns the error for the handler. It closes the handle if the failed statement
// also ended the transaction, so that nothing is executed outside of it.
func (h *Handle) judge(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: %w", h.ended, err)
	}
	lost := h.lost(ctx, err)
	if lost == nil && errors.Is(err, oncemill.ErrTxOwned) {
		lost = err
	}
	if lost != nil {
		_ = h.Close(lost) // another goroutine may have closed it, with its own reason
		return lost
	}
	return err
}

// Close makes the handle refuse everything with reason. If it was closed before, it keeps
// and returns its first reason.
func (h *Handle) Close(reason error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return h.closed
	}
	h.closed = reason
	return nil
}

// ended is a context that has ended with a given error.
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
