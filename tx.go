package oncemill

import (
	"context"
	"database/sql"

	"github.com/oncemill/oncemill/internal/txcontext"
)

// Tx is a database transaction that the caller began and will end. oncemill executes
// statements in it and never calls Commit or Rollback. They are part of the interface
// so that a *sql.DB, which would silently lose atomicity, does not compile in place of
// a transaction. *sql.Tx is a Tx; see [FromPgx] for pgx.Tx.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	Commit() error
	Rollback() error
}

// ContextWithTx returns a context that carries tx. oncemill passes transactions in a
// context in no other way: context-bound publishers and inbox handlers find the
// transaction through it.
func ContextWithTx(ctx context.Context, tx Tx) context.Context {
	return txcontext.With(ctx, tx)
}

// TxFromContext returns the transaction that [ContextWithTx] put into ctx.
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

// FromPgx adapts a pgx.Tx to [Tx]:
//
//	box.Publish(ctx, oncemill.FromPgx(tx), "orders", msg)
//
// The type parameter is inferred. As with every Tx, the caller ends the transaction.
// Commit and Rollback of the adapter return [ErrTxOwned], since they have no context to
// pass to pgx.
func FromPgx[T interface{ RowsAffected() int64 }](tx PgxTx[T]) Tx {
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
