package oncemill

import (
	"context"
	"database/sql"

	"github.com/oncemill/oncemill/internal/txcontext"
)

// Tx is a database transaction: a *sql.Tx that you began, or the transaction that a
// handler of package inbox or idempotency runs in. sqlc's DBTX, GORM's ConnPool and bun's
// IConn take a Tx; for code that is written for pgx see package pgxtx, which is a module
// of its own.
//
// A handler does not end its transaction. There Commit and Rollback do nothing and return
// [ErrTxOwned], so a deferred Rollback is harmless; whether it commits is decided by what
// the handler returns. SQL text that ends the transaction is not sent: it returns
// ErrTxOwned and fails the attempt. Savepoints work. After the handler has returned, every
// statement is refused. On PostgreSQL, set constraints all immediate fails; name the
// constraints instead.
type Tx interface {
	ExecTx
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// ExecTx is what publishing needs of a transaction: any [Tx], or a pgx.Tx by [FromPgx].
// oncemill never calls Commit or Rollback. They are part of the interface so that a
// *sql.DB, which would silently lose atomicity, does not compile in place of a transaction.
type ExecTx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	Commit() error
	Rollback() error
}

// ContextWithTx returns a context that carries tx. oncemill passes transactions in a
// context in no other way: context-bound publishers and handlers find the transaction
// through it.
func ContextWithTx(ctx context.Context, tx ExecTx) context.Context {
	return txcontext.With(ctx, tx)
}

// TxFromContext returns the transaction that [ContextWithTx] put into ctx. One that only
// executes, as those of [FromPgx], is not returned.
func TxFromContext(ctx context.Context) (Tx, bool) {
	tx, ok := txcontext.From(ctx).(Tx)
	return tx, ok
}

// PgxTx is the part of pgx.Tx that oncemill uses; T is pgconn.CommandTag.
type PgxTx[T interface{ RowsAffected() int64 }] interface {
	Exec(ctx context.Context, query string, args ...any) (T, error)
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// FromPgx adapts a pgx.Tx to [ExecTx]:
//
//	box.Publish(ctx, oncemill.FromPgx(tx), "orders", msg)
//
// The type parameter is inferred. The caller ends the transaction, as always.
// Commit and Rollback of the adapter return [ErrTxOwned], since they have no context to
// pass to pgx.
func FromPgx[T interface{ RowsAffected() int64 }](tx PgxTx[T]) ExecTx {
	if tx == nil {
		return nil
	}
	return pgxTx[T]{tx: tx}
}

type pgxTx[T interface{ RowsAffected() int64 }] struct{ tx PgxTx[T] }

func (p pgxTx[T]) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tag, err := p.tx.Exec(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return pgxResult(tag.RowsAffected()), nil
}

func (p pgxTx[T]) Commit() error   { return ErrTxOwned }
func (p pgxTx[T]) Rollback() error { return ErrTxOwned }

type pgxResult int64

func (r pgxResult) LastInsertId() (int64, error) { return 0, ErrNoLastInsertID }
func (r pgxResult) RowsAffected() (int64, error) { return int64(r), nil }
