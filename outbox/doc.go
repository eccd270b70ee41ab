// Package outbox writes messages in the caller's SQL transaction: a message
// exists if and only if that transaction commits.
//
//	box, err := outbox.New(db, outbox.Config{})
//	...
//	err = box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
//		if _, err := tx.ExecContext(ctx, `update stock set ...`); err != nil {
//			return err
//		}
//		msg := message.NewMessage(watermill.NewUUID(), payload)
//		outbox.SetKey(msg, order.Customer)
//		return box.Publisher(tx).Publish("orders", msg)
//	})
//
// A row of the outbox is a message that the broker has not confirmed; package
// relay delivers it and then deletes the row. Nothing else says what is owed.
//
// # Order
//
// Messages of one ordering key are delivered in the order of their ids. Ids are
// taken at the insert, before the commit, so the order of a key is the order of
// its producers' commits only if they serialise on the key: take the key's lock
// first (update its row, or select it for update), publish after it, in the
// same transaction.
//
//	update account set ... where id = $1   -- serialises the key
//	box.Publisher(tx).Publish(...)          -- its id is taken under that lock
//
// The other way round is wrong: of two transactions that publish first and then
// wait for each other's row, the one with the later id may commit first. The
// same goes for an insert that nothing serialises.
//
// Messages without a key have no order.
//
// # What it does not do
//
// The outbox does not send anything by itself, and it does not remove
// duplicates: a producer that runs its transaction twice publishes twice, unless
// it chooses the message id, in which case the consumer's inbox drops the second.
package outbox
