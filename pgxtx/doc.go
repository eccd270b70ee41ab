// Package pgxtx is the transaction of a handler for code that is written for pgx: sqlc's
// code for pgx/v5, batches, CopyFrom.
//
//	func reserve(order *message.Message) error {
//		tx, err := pgxtx.FromContext(order.Context())
//		if err != nil {
//			return err
//		}
//		return stock.New(tx).Reserve(order.Context(), order.UUID)
//	}
//
// It is the same transaction that inbox.TxFromContext and idempotency.TxFromContext return,
// so what it writes commits with the id of the message, or with the answer to the request.
// The database must be opened with pgx: stdlib.OpenDBFromPool for a pgxpool.Pool,
// stdlib.OpenDB, or sql.Open with the driver "pgx".
//
// There is no Begin, Commit or Rollback. SQL text that ends the transaction is not sent: it
// returns oncemill.ErrTxOwned and fails the attempt. If a text gets past that check, the
// seal makes the database refuse the commit. Savepoints work. After the handler has
// returned, every method fails as those of its [oncemill.Tx] do.
//
// Results are read in full before a method returns. So rows and batches that are not
// closed hold nothing up, and statements may be executed while rows are read. A query of
// very many rows takes as much memory; read it in pages.
package pgxtx
