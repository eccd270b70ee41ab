package txhandle

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Statements are what can be done in a transaction. *sql.Tx has them.
type Statements interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// Repeats prepares what the handlers of a transaction repeat, where that pays: with
// lib/pq, which prepares nothing by itself. Other drivers do it or, as SQLite's, have no
// server to save from it.
type Repeats struct {
	wanted atomic.Bool
}

// NewRepeats returns one for transactions of db.
func NewRepeats(db *sql.DB) *Repeats {
	r := new(Repeats)
	_, pays := db.Driver().(*pq.Driver)
	r.wanted.Store(pays)
	return r
}

// Statements returns tx as its n handlers see it, one after another. end belongs before the
// end of the transaction: behind a pooler that gives every transaction a connection, what
// is sent after it reaches another one. It returns an error once, when what is prepared
// has met what others have: nothing is prepared any more.
func (r *Repeats) Statements(tx *sql.Tx, n int) (statements Statements, end func() error) {
	const worthwhile = 8 // it costs a round trip before and one after
	if !r.wanted.Load() || n < worthwhile {
		return tx, func() error { return nil }
	}
	prepares := &repeated{tx: tx, known: make(map[string]*sql.Stmt)}
	return prepares, func() error {
		if err := prepares.close(); sqlerr.State(err) == nameTaken && r.wanted.Swap(false) {
			return err
		}
		return nil
	}
}

// nameTaken is the SQLSTATE of a statement that is prepared under a name that the
// connection knows already. lib/pq counts from 1 on each of its connections, so behind
// a pooler this comes of whoever has left one prepared.
const nameTaken = "42P05"

// repeated is a transaction that prepares a statement when it is executed for the
// second time. Without it a driver that keeps no prepared statements, as lib/pq, has
// the server parse and plan each anew, which is most of the cost of a small one.
//
// The first query ends that, for all of the transaction. Rows that are still open,
// because a handler executes something for each or has forgotten them, make lib/pq
// refuse a statement, but not one that is prepared: that reads the rows as its answer
// and costs the connection.
//
// It may be used concurrently, as *sql.Tx may.
type repeated struct {
	tx *sql.Tx

	mu    sync.Mutex
	over  bool
	known map[string]*sql.Stmt // nil for what has come once
	err   error                // of the preparation that failed
}

// mostPrepared bounds what a handler that writes its values into the text makes
// the server and us keep.
const mostPrepared = 32

// close lets go of what was prepared, and returns why something could not be
// prepared. It belongs before the end of the transaction: behind a pooler that gives
// every transaction a connection, what is sent after it reaches another one.
func (r *repeated) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stop()
	return r.err
}

// stop lets go of what was prepared, for good. Called with mu held.
func (r *repeated) stop() {
	r.over = true
	for _, stmt := range r.known {
		if stmt != nil {
			_ = stmt.Close() // it ends with the connection too
		}
	}
	clear(r.known)
}

// ExecContext is that of *sql.Tx.
func (r *repeated) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
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
func (r *repeated) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return r.plain().QueryContext(ctx, query, args...)
}

// QueryRowContext is that of *sql.Tx.
func (r *repeated) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return r.plain().QueryRowContext(ctx, query, args...)
}

// PrepareContext is that of *sql.Tx.
func (r *repeated) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	return r.plain().PrepareContext(ctx, query)
}

// plain returns the transaction for what may leave rows open.
func (r *repeated) plain() *sql.Tx {
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
func (r *repeated) prepared(ctx context.Context, query string, args []any) (*sql.Stmt, error) {
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
