package lent

import (
	"context"
	"database/sql"
	"sync"
)

// Statements are what can be done in a transaction. *sql.Tx has them.
type Statements interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// Repeated is a transaction that prepares a statement when it comes for the second
// time. Without it a driver that keeps no prepared statements, as lib/pq, has the
// server parse and plan each anew, which is most of the cost of a small one.
//
// It may be used concurrently, as *sql.Tx may.
type Repeated struct {
	tx *sql.Tx

	mu    sync.Mutex
	known map[string]*sql.Stmt // nil for what has come once
}

// mostPrepared bounds what a borrower that writes its values into the text makes
// the server and us keep.
const mostPrepared = 32

// Repeat returns tx as one that prepares what is repeated. It is to be closed.
func Repeat(tx *sql.Tx) *Repeated {
	return &Repeated{tx: tx, known: make(map[string]*sql.Stmt)}
}

// Close lets go of what was prepared. It belongs before the end of the transaction:
// behind a pooler that gives every transaction a connection, what is sent after it
// reaches another one.
func (r *Repeated) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, stmt := range r.known {
		if stmt != nil {
			_ = stmt.Close() // it ends with the connection too
		}
	}
	clear(r.known)
}

// ExecContext is that of *sql.Tx.
func (r *Repeated) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	stmt, err := r.prepared(ctx, query, args) //nolint:sqlclosecheck // Close does
	if err != nil {
		return nil, err
	}
	if stmt == nil {
		return r.tx.ExecContext(ctx, query, args...)
	}
	return stmt.ExecContext(ctx, args...)
}

// QueryContext is that of *sql.Tx.
func (r *Repeated) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	stmt, err := r.prepared(ctx, query, args) //nolint:sqlclosecheck // Close does
	if err != nil {
		return nil, err
	}
	if stmt == nil {
		return r.tx.QueryContext(ctx, query, args...)
	}
	return stmt.QueryContext(ctx, args...)
}

// QueryRowContext is that of *sql.Tx.
func (r *Repeated) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	stmt, err := r.prepared(ctx, query, args) //nolint:sqlclosecheck // Close does
	if err != nil {
		return failedRow(r.tx, err) //nolint:contextcheck // it is not for a statement
	}
	if stmt == nil {
		return r.tx.QueryRowContext(ctx, query, args...)
	}
	return stmt.QueryRowContext(ctx, args...)
}

// PrepareContext is that of *sql.Tx.
func (r *Repeated) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	return r.tx.PrepareContext(ctx, query)
}

// prepared returns nil for a statement that is to be sent as it is: for the first
// time, or without arguments, which may be several statements and is one round
// trip with every driver.
func (r *Repeated) prepared(ctx context.Context, query string, args []any) (*sql.Stmt, error) {
	if len(args) == 0 {
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	stmt, seen := r.known[query]
	switch {
	case stmt != nil:
		return stmt, nil
	case seen:
		stmt, err := r.tx.PrepareContext(ctx, query) //nolint:sqlclosecheck // Close does
		if err != nil {
			return nil, err
		}
		r.known[query] = stmt
		return stmt, nil
	case len(r.known) < mostPrepared:
		r.known[query] = nil
	}
	return nil, nil
}
