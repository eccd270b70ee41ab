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
//		return box.Publish(ctx, tx, "orders", msg)
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
//	box.Publish(ctx, tx, ...)               -- its id is taken under that lock
//
// The other way round is wrong: of two transactions that publish first and then
// wait for each other's row, the one with the later id may commit first. The
// same goes for an insert that nothing serialises.
//
// Messages without a key have no order.
//
// # Later delivery
//
// [SetDeliverAt] and [SetDeliverAfter] keep a message back. It waits in a table of
// its own, and a relay makes it a message of the outbox when it is due by the
// database's clock, never before. Those that were committed before the relay
// looked come in the order of their times and, of one time, of their publishing;
// towards messages that were not kept back there is no order but that of becoming
// due. [Outbox.CancelScheduled] takes one back.
//
// # History
//
// What was delivered is kept for Config.History: [History] searches it and sends
// again from it. Config.Archive gets what it gives up.
//
// # Wake-up
//
// RunInTx and Wake wake the relays of the process; a [Notifier] and a [Listener]
// carry that over to others. Nothing depends on it: relays poll.
//
// # What it does not do
//
// The outbox does not send anything by itself, and it does not remove
// duplicates: a producer that runs its transaction twice publishes twice, unless
// it chooses the message id, in which case the consumer's inbox drops the second.
package outbox
