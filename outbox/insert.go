package outbox

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

// Ids are given out in the order of the values, so rows are ordered as in the call.
const insertText = `insert into {{outbox}} (lane, topic, message_id, key, payload, metadata) values `

const (
	insertColumns    = 6
	rowsPerInsert    = 10_000 // 60,000 of the 65,535 parameters of PostgreSQL's protocol
	sqliteRowsInsert = 100    // in process: a statement costs no round trip, and binding is quadratic
)

// prepareLimit is how long a server may take to prepare the statement.
const prepareLimit = time.Second

// inserts are the statements that write rows. The single-row statement, which most
// calls need, stays prepared once prepare was called.
type inserts struct {
	head, one string
	most      int // rows of a statement

	preparing atomic.Bool
	prepared  atomic.Pointer[sql.Stmt] // it lives as long as its pool
}

func newInserts(names database.Database) *inserts {
	i := &inserts{head: names.Expand(insertText), most: rowsPerInsert}
	if names.Dialect == oncemill.SQLite {
		i.most = sqliteRowsInsert
	}
	i.one = i.head + valuesText(1)
	return i
}

// insert writes rows.
func (o *Outbox) insert(ctx context.Context, tx oncemill.ExecTx, rows []outboxstore.Row) error {
	own, _ := ctx.Value(ownKey{o}).(*ownTx)
	for chunk := range chunks(rows, o.inserts.most, func(r *outboxstore.Row) *outboxstore.Row { return r }) {
		var err error
		if len(chunk) == 1 && own != nil && tx == oncemill.ExecTx(own.tx.Raw) {
			err = own.execute(ctx, insertArgs(chunk))
		} else {
			_, err = tx.ExecContext(ctx, o.inserts.text(len(chunk)), insertArgs(chunk)...)
		}
		if err != nil {
			return err
		}
	}
	return nil
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

func (i *inserts) text(rows int) string {
	if rows == 1 {
		return i.one
	}
	return i.head + valuesText(rows)
}

// prepare prepares the single-row statement. It is called after a transaction has
// succeeded: the server answers, and a connection is free. One caller at a time prepares;
// the others, and those after a failure, write without it, which is only slower.
func (o *Outbox) prepare(ctx context.Context) {
	i, pool := o.inserts, o.db.Stats()
	if i.prepared.Load() != nil || i.preparing.Load() || pool.MaxOpenConnections > 0 && pool.InUse >= pool.MaxOpenConnections {
		return
	}
	_, _ = bounded.Do(ctx, o.calls, prepareLimit, func(ctx context.Context) (struct{}, error) {
		if i.prepared.Load() != nil || !i.preparing.CompareAndSwap(false, true) {
			return struct{}{}, nil
		}
		defer i.preparing.Store(false)
		stmt, err := o.db.PrepareContext(ctx, i.one)
		if err == nil {
			i.prepared.Store(stmt)
		}
		return struct{}{}, err
	})
}

// valuesText returns ($1, ..., $6), ($7, ...) for n rows.
func valuesText(n int) string {
	var b strings.Builder
	b.Grow(n * insertColumns * 7)
	for i := range n * insertColumns {
		switch {
		case i == 0:
			b.WriteByte('(')
		case i%insertColumns == 0:
			b.WriteString("), (")
		default:
			b.WriteString(", ")
		}
		b.WriteByte('$')
		b.WriteString(strconv.Itoa(i + 1))
	}
	b.WriteByte(')')
	return b.String()
}

func insertArgs(rows []outboxstore.Row) []any {
	args := make([]any, 0, len(rows)*insertColumns)
	for _, r := range rows {
		args = append(args, r.Lane, r.Topic, r.MessageID, r.Key, r.Payload, r.Metadata)
	}
	return args
}
