package pgxtx

import "errors"

var (
	// ErrNoTx means that there is no transaction of a handler. Call [FromContext] with
	// the context of the message, request or command, in the handler of inbox.Middleware,
	// of idempotency's TxMiddleware or of a command.
	ErrNoTx = errors.New("pgxtx: no transaction of a handler; use the context of the message, request or command")

	// ErrNotPgx means that the transaction is not one of pgx. Open the database with
	// pgx, for example by stdlib.OpenDBFromPool.
	ErrNotPgx = errors.New("pgxtx: the transaction is not one of pgx; open the database with pgx's package stdlib")
)
