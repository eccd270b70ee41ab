package pgxtx

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/txhandle"
)

// Tx is the transaction of a handler with the methods of pgx.Tx that do not end it. It is a
// DBTX of sqlc's code for pgx/v5. The methods may be called concurrently; they run one
// after another.
type Tx struct {
	handle *txhandle.Handle
}

// FromContext returns the transaction of the handler that ctx belongs to. It does no I/O.
// The error is [ErrNoTx], [ErrNotPgx], or that of a transaction which has ended.
func FromContext(ctx context.Context) (*Tx, error) {
	tx, _ := oncemill.TxFromContext(ctx)
	return from(ctx, tx)
}

// From is [FromContext] for a handler that gets its transaction as an [oncemill.Tx], as
// those of inbox.Handle do.
func From(ctx context.Context, tx oncemill.Tx) (*Tx, error) { return from(ctx, tx) }

func from(ctx context.Context, tx oncemill.Tx) (*Tx, error) {
	handle, ok := txhandle.Of(tx)
	if !ok {
		return nil, ErrNoTx
	}
	t := &Tx{handle: handle}
	_, err := do(ctx, t, nil, func(context.Context, *pgx.Conn) (struct{}, error) { return struct{}{}, nil })
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Exec is that of pgx.Tx.
func (t *Tx) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	return do(ctx, t, []string{sql}, func(ctx context.Context, conn *pgx.Conn) (pgconn.CommandTag, error) {
		return conn.Exec(ctx, sql, arguments...)
	})
}

// Query is that of pgx.Tx. All rows have been read when it returns, and all errors of the
// database are returned by it.
func (t *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := t.query(ctx, allRows, sql, args)
	return rows, err
}

// QueryRow is that of pgx.Tx.
func (t *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := t.query(ctx, 1, sql, args) // Scan returns the error
	return row{rows}
}

func (t *Tx) query(ctx context.Context, most int, sql string, args []any) (*rows, error) {
	found, err := do(ctx, t, []string{sql}, func(ctx context.Context, conn *pgx.Conn) (*rows, error) {
		return read(conn, most)(conn.Query(ctx, sql, args...))
	})
	if err != nil {
		return &rows{err: err}, err
	}
	return found, nil
}

// CopyFrom is that of pgx.Tx. rowSrc must not use the transaction. A panic of it is
// returned as an [*oncemill.PanicError].
func (t *Tx) CopyFrom(ctx context.Context, tableName pgx.Identifier, columnNames []string, rowSrc pgx.CopyFromSource) (int64, error) {
	return do(ctx, t, []string{"copy"}, func(ctx context.Context, conn *pgx.Conn) (int64, error) {
		source := &source{CopyFromSource: rowSrc}
		n, err := conn.CopyFrom(ctx, tableName, columnNames, source)
		if source.panicked != nil {
			err = source.panicked
		}
		return n, err
	})
}

// do runs f with the connection of t. queries are what it executes.
func do[T any](ctx context.Context, t *Tx, queries []string, f func(ctx context.Context, conn *pgx.Conn) (T, error)) (T, error) {
	if len(queries) > 1 {
		// pgx may send them as one text, where a quote that one opens hides the next.
		queries = append(queries, strings.Join(queries, ";"))
	}
	return txhandle.Driver(ctx, t.handle, queries, func(ctx context.Context, driverConn any) (v T, err error) {
		conn, ok := unwrap(driverConn)
		switch {
		case !ok:
			return v, ErrNotPgx
		case conn.IsClosed():
			return v, fmt.Errorf("pgxtx: the connection is closed: %w", driver.ErrBadConn)
		case ended(conn):
			return v, errEnded
		}
		v, err = f(ctx, conn)
		switch {
		case conn.IsClosed():
			if err != nil && ctx.Err() == nil && !sqlerr.Connection(err) {
				err = fmt.Errorf("%w: %w", driver.ErrBadConn, err)
			}
		case ended(conn):
			err = errors.Join(errEnded, err)
		}
		return v, err
	})
}

// errEnded is returned for a statement that has ended the transaction although its text
// passed the check.
var errEnded = fmt.Errorf("pgxtx: a statement has ended the transaction: %w", oncemill.ErrTxOwned)

// ended reports whether the server is in no transaction.
func ended(conn *pgx.Conn) bool { return conn.PgConn().TxStatus() == 'I' }

// unwrap finds pgx's connection below those of drivers that wrap it, as for tracing.
func unwrap(driverConn any) (*pgx.Conn, bool) {
	for {
		switch c := driverConn.(type) {
		case *stdlib.Conn:
			return c.Conn(), true
		case interface{ Raw() driver.Conn }:
			driverConn = c.Raw()
		default:
			return nil, false
		}
	}
}
