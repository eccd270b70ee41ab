package outbox

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

// prepareLimit is how long a server may take to prepare the statement.
const prepareLimit = time.Second

// prepared is the statement that writes one row, which most calls need. It stays
// prepared once prepare was called.
type prepared struct {
	preparing atomic.Bool
	insert    atomic.Pointer[sql.Stmt] // it lives as long as its pool
}

// insert writes rows.
func (o *Outbox) insert(ctx context.Context, tx oncemill.ExecTx, rows []outboxstore.Row) error {
	own, _ := ctx.Value(ownKey{o}).(*ownTx)
	if len(rows) == 1 && own != nil && tx == oncemill.ExecTx(own.tx.Raw) {
		return own.execute(ctx, outboxstore.InsertArgs(rows[0]))
	}
	return o.store.Insert(ctx, tx, rows)
}

// ownKey is the context key for a transaction of RunInTx. A prepared statement belongs
// to one pool, and a *sql.Tx does not reveal its pool.
type ownKey struct{ *Outbox }

// ownTx is a transaction of RunInTx, with the statement that is prepared in its pool.
type ownTx struct {
	tx       *boundtx.Tx
	prepared *sql.Stmt

	mu   sync.Mutex // guards stmt
	stmt *sql.Stmt  // prepared, in the transaction, which closes it; nil before its first use
}

// execute returns when ctx ends, also while the driver does not: lib/pq waits until the
// server has taken note that a prepared statement is canceled.
func (o *ownTx) execute(ctx context.Context, args []any) error {
	_, err := boundtx.Wait(ctx, o.tx, func() (sql.Result, error) {
		return o.statement(ctx).ExecContext(ctx, args...) //nolint:sqlclosecheck // the transaction closes it
	})
	return err
}

func (o *ownTx) statement(ctx context.Context) *sql.Stmt {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stmt != nil {
		return o.stmt
	}
	stmt := o.tx.Raw.StmtContext(ctx, o.prepared)
	if ctx.Err() == nil { // or it may hold the error of ctx
		o.stmt = stmt
	}
	return stmt
}

// prepare prepares the single-row statement. It is called after a transaction has
// succeeded: the server answers, and a connection is free. One caller at a time prepares;
// the others, and those after a failure, write without it, which is only slower.
func (o *Outbox) prepare(ctx context.Context) {
	p, pool := &o.prepared, o.db.Stats()
	if p.insert.Load() != nil || p.preparing.Load() || pool.MaxOpenConnections > 0 && pool.InUse >= pool.MaxOpenConnections {
		return
	}
	_, _ = bounded.Do(ctx, o.calls, prepareLimit, func(ctx context.Context) (struct{}, error) {
		if p.insert.Load() != nil || !p.preparing.CompareAndSwap(false, true) {
			return struct{}{}, nil
		}
		defer p.preparing.Store(false)
		stmt, err := o.store.PrepareInsert(ctx)
		if err == nil {
			p.insert.Store(stmt)
		}
		return struct{}{}, err
	})
}
