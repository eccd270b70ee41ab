package txhandle

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Statements executes statements in a transaction. *sql.Tx implements it.
type Statements interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// Repeats prepares the statements that the handlers of a transaction repeat. It does so
// only with lib/pq, which keeps no prepared statements. pgx keeps them itself, and SQLite
// has no server.
type Repeats struct {
	wanted atomic.Bool
}

// NewRepeats returns a Repeats for transactions of db.
func NewRepeats(db *sql.DB) *Repeats {
	r := new(Repeats)
	_, pays := db.Driver().(*pq.Driver)
	r.wanted.Store(pays)
	return r
}

// Statements returns the Statements for the n handlers that use tx one after another. Call
// end before the transaction ends: behind a pooler in transaction mode, later statements
// reach another connection. end returns an error once, if the name of a prepared statement
// was in use on the connection. From then on nothing is prepared.
func (r *Repeats) Statements(tx *sql.Tx, n int) (statements Statements, end func() error) {
	const worthwhile = 8 // preparing costs a round trip, and closing another
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

// nameTaken is the SQLSTATE for a prepared statement whose name is in use on the
// connection. lib/pq numbers them from 1 on each connection. Behind a pooler, another
// client may have left one prepared.
const nameTaken = "42P05"

// repeated is a transaction that prepares a statement when it is executed for the second
// time. Otherwise the server parses and plans it each time, which is most of the cost of a
// small statement.
//
// The first query stops preparing for the rest of the transaction. A handler may leave its
// rows open. lib/pq then refuses a plain statement, but not a prepared one: that reads the
// rows as its own answer, and the connection is lost.
//
// It is safe for concurrent use, like *sql.Tx.
type repeated struct {
	tx *sql.Tx

	mu    sync.Mutex
	over  bool
	known map[string]*sql.Stmt // by text; nil for a statement that was executed once
	err   error                // of the preparation that failed
}

// mostPrepared bounds the statements that are remembered and prepared, for handlers that
// write values into the text.
const mostPrepared = 32

// close closes the prepared statements, and returns why one could not be prepared. Call it
// before the transaction ends; see [Repeats.Statements].
func (r *repeated) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stop()
	return r.err
}

// stop closes the prepared statements and stops preparing. Called with mu held.
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

// plain returns the transaction for statements that may leave rows open.
func (r *repeated) plain() *sql.Tx {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.over {
		r.stop()
	}
	return r.tx
}

// prepared returns nil for a statement that is not to be prepared: it is executed for the
// first time, or has no arguments. Without arguments the text may hold several statements,
// and takes one round trip with every driver. Called with mu held.
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
			if r.err == nil { // later errors only report that the transaction is aborted
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
