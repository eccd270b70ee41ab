package outbox

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/oncemill/oncemill"
)

// Ids are given out in the order of the values, so the order of the call is the order
// of the rows.
const insertText = `insert into {{outbox}} (lane, topic, message_id, key, payload, metadata) values `

const (
	insertColumns    = 6
	rowsPerInsert    = 10_000 // 60,000 of the 65,535 parameters of PostgreSQL's protocol
	sqliteRowsInsert = 100    // in process: a statement costs no round trip, and binding is quadratic
)

// inserts are the statements that write rows. That of one row, which most calls need, is
// kept prepared once prepare was called.
type inserts struct {
	head, one string
	most      int // rows of a statement

	preparing sync.Mutex
	prepared  atomic.Pointer[sql.Stmt] // it lives as long as its pool
}

func newInserts(names oncemill.Config) *inserts {
	i := &inserts{head: names.Expand(insertText), most: rowsPerInsert}
	if names.Dialect == oncemill.SQLite {
		i.most = sqliteRowsInsert
	}
	i.one = i.head + valuesText(1)
	return i
}

// ownTx is the key, in the context of RunInTx's function, of its transaction. What is
// prepared is of one pool, and no *sql.Tx says which its own is.
type ownTx struct{ *Outbox }

// insert writes rows.
func (o *Outbox) insert(ctx context.Context, tx oncemill.Tx, rows []Row) error {
	for chunk := range chunks(rows, o.inserts.most, func(r *Row) *Row { return r }) {
		var err error
		if own, stmt := o.preparedFor(ctx, tx); stmt != nil && len(chunk) == 1 {
			_, err = own.StmtContext(ctx, stmt).ExecContext(ctx, insertArgs(chunk)...) //nolint:sqlclosecheck // the transaction closes it
		} else {
			_, err = tx.ExecContext(ctx, o.inserts.text(len(chunk)), insertArgs(chunk)...)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// preparedFor returns what is prepared for tx, nil if there is nothing.
func (o *Outbox) preparedFor(ctx context.Context, tx oncemill.Tx) (*sql.Tx, *sql.Stmt) {
	if !o.cfg.Prepare {
		return nil, nil
	}
	own, ok := ctx.Value(ownTx{o}).(*sql.Tx)
	if !ok || tx != oncemill.Tx(own) {
		return nil, nil
	}
	return own, o.inserts.prepared.Load()
}

func (i *inserts) text(rows int) string {
	if rows == 1 {
		return i.one
	}
	return i.head + valuesText(rows)
}

// prepare needs a connection, so it is not for those who hold one. Who comes while another
// one prepares goes on without.
func (i *inserts) prepare(ctx context.Context, db *sql.DB) error {
	if i.prepared.Load() != nil || !i.preparing.TryLock() {
		return nil
	}
	defer i.preparing.Unlock()
	if i.prepared.Load() != nil {
		return nil
	}
	stmt, err := db.PrepareContext(ctx, i.one)
	if err != nil {
		return err
	}
	i.prepared.Store(stmt)
	return nil
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

func insertArgs(rows []Row) []any {
	args := make([]any, 0, len(rows)*insertColumns)
	for _, r := range rows {
		args = append(args, r.Lane, r.Topic, r.MessageID, r.Key, r.Payload, r.Metadata)
	}
	return args
}
