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

// Repeated is a transaction that prepares a statement when it is executed for the
// second time. Without it a driver that keeps no prepared statements, as lib/pq, has
// the server parse and plan each anew, which is most of the cost of a small one.
//
// The first query ends that, for all of the transaction. Rows that are still open,
// because a borrower executes something for each or has forgotten them, make lib/pq
// refuse a statement, but not one that is prepared: that reads the rows as its answer
// and costs the connection.
//
// It may be used concurrently, as *sql.Tx may.
type Repeated struct {
	tx *sql.Tx

	mu    sync.Mutex
	over  bool
	known map[string]*sql.Stmt // nil for what has come once
	err   error                // of the preparation that failed
}

// mostPrepared bounds what a borrower that writes its values into the text makes
// the server and us keep.
const mostPrepared = 32

// Repeat returns tx as one that prepares what is repeated. It is to be closed.
func Repeat(tx *sql.Tx) *Repeated {
	return &Repeated{tx: tx, known: make(map[string]*sql.Stmt)}
}

// Close lets go of what was prepared, and returns why something could not be
// prepared. It belongs before the end of the transaction: behind a pooler that gives
// every transaction a connection, what is sent after it reaches another one.
func (r *Repeated) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stop()
	return r.err
}

// stop lets go of what was prepared, for good. Called with mu held.
func (r *Repeated) stop() {
	r.over = true
	for _, stmt := range r.known {
		if stmt != nil {
			_ = stmt.Close() // it ends with the connection too
		}
	}
	clear(r.known)
}

// ExecContext is that of *sql.Tx.
func (r *Repeated) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	r.mu.Lock()
	defer r.mu.Unlock()                       // so that nothing is closed or queried meanwhile
	stmt, err := r.prepared(ctx, query, args) //nolint:sqlclosecheck // stop does
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
	return r.plain().QueryContext(ctx, query, args...)
}

// QueryRowContext is that of *sql.Tx.
func (r *Repeated) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return r.plain().QueryRowContext(ctx, query, args...)
}

// PrepareContext is that of *sql.Tx.
func (r *Repeated) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	return r.plain().PrepareContext(ctx, query)
}

// plain returns the transaction for what may leave rows open.
func (r *Repeated) plain() *sql.Tx {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.over {
		r.stop()
	}
	return r.tx
}

// prepared returns nil for a statement that is to be sent as it is: for the first
// time, or without arguments, which may be several statements and is one round
// trip with every driver. Called with mu held.
func (r *Repeated) prepared(ctx context.Context, query string, args []any) (*sql.Stmt, error) {
	if r.over || len(args) == 0 {
		return nil, nil
	}
	stmt, seen := r.known[query]
	switch {
	case stmt != nil:
		return stmt, nil
	case seen:
		stmt, err := r.tx.PrepareContext(ctx, query)
		if err != nil {
			if r.err == nil { // what comes after it says that the transaction has failed
				r.err = err
			}
			return nil, err
		}
		r.known[query] = stmt
		return stmt, nil
	case len(r.known) < mostPrepared:
		r.known[query] = nil
	}
	return nil, nil
}
