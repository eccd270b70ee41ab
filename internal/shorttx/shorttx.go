// Package shorttx runs short transactions on PostgreSQL with time limits that the server
// enforces.
package shorttx

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Limits bound the waits of a transaction. The server enforces them. They apply to the
// transaction only (SET LOCAL), so they work through a pooler.
//
// They are shorter than the limit of the call that runs the transaction (see package
// bounded). So the server answers before the caller gives up, and the caller can
// distinguish a lock from a silent connection.
type Limits struct {
	// Lock is the longest wait for a lock: 55P03 after that.
	Lock time.Duration

	// Statement is the longest run of a statement: 57014 after that.
	Statement time.Duration
}

// Idle is how long the server keeps a transaction whose client is idle: 25P03 after that.
// A process that is frozen in a transaction holds its locks no longer than this.
const Idle = 2 * time.Second

// Repair is for an operator's transaction that locks out writers. It waits for the
// transactions in progress, and later ones wait behind it.
var Repair = Limits{Lock: 5 * time.Second, Statement: time.Minute}

// For returns the limits of a transaction whose caller waits for at most call.
func For(call time.Duration) Limits {
	return Limits{Lock: call / 4, Statement: call / 2}
}

// Within returns the limits of a transaction, from the deadline of its context.
func Within(ctx context.Context) Limits {
	if deadline, ok := ctx.Deadline(); ok {
		return For(time.Until(deadline))
	}
	return For(5 * time.Second)
}

// Run runs fn in a transaction, and commits. An error of fn rolls back.
//
// It sets READ COMMITTED explicitly: where REPEATABLE READ is the default, a statement
// after a lock would see the state from before the lock.
func Run(ctx context.Context, db *sql.DB, l Limits, fn func(tx *sql.Tx) error) error {
	line := bounded.LineOf(ctx)
	tx, err := line.BeginTx(ctx, db, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return sqlerr.OfBegin(err)
	}
	defer func() {
		if ctx.Err() != nil {
			line.Lose() // database/sql's rollback may get no answer
			return
		}
		line.Close()
	}()
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if _, err := tx.ExecContext(ctx, l.text()); err != nil {
		return err
	}
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	// A context that ends during COMMIT ends the wait for a synchronous standby, and
	// lib/pq reports success all the same.
	return ctx.Err()
}

// text sets the limits. 0 would mean none.
func (l Limits) text() string {
	return fmt.Sprintf(
		`set local lock_timeout = %d; set local statement_timeout = %d; set local idle_in_transaction_session_timeout = %d`,
		max(1, l.Lock.Milliseconds()), max(1, l.Statement.Milliseconds()), Idle.Milliseconds(),
	)
}
