// Package outbox writes messages in the caller's SQL transaction: a message exists if
// and only if that transaction commits.
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
// A row of the outbox is a message that the broker has not confirmed. Package relay
// delivers it and then deletes the row. Nothing else records what is left to deliver.
//
// # Order
//
// Messages of one ordering key are delivered in the order of their ids. An id is taken
// at the insert, before the commit. The order of a key is therefore the commit order of
// its producers only if they serialize on the key. Take the key's lock first (update
// its row, or select it for update), then publish, in the same transaction.
//
//	update account set ... where id = $1   -- serializes the key
//	box.Publish(ctx, tx, ...)               -- its id is taken under that lock
//
// The reverse is wrong: if two transactions publish first and then wait for the same
// row, the one with the later id may commit first. The same goes for an insert that
// nothing serializes.
//
// Messages without a key have no order.
//
// # Later delivery
//
// [SetDeliverAt] and [SetDeliverAfter] schedule a message. It waits in a separate
// table. A relay moves it into the outbox when it is due by the database's clock, never
// before. Scheduled messages that were committed before the relay looked are delivered
// by due time, then publish order. Relative to other messages they are ordered only by
// when they become due. [Outbox.CancelScheduled] cancels one.
//
// # History
//
// Delivered messages are kept for Config.History. [History] searches them and resends
// from them. Config.Archive receives the messages that are past it.
//
// # Wake-up
//
// RunInTx and Wake wake the relays of this process. A [Notifier] and a [Listener] wake
// those of other processes. Both are optional: relays poll.
//
// # What it does not do
//
// The outbox does not send anything by itself. It does not remove duplicates: a
// producer that runs its transaction twice publishes twice. If the producer chooses the
// message id, the consumer's inbox drops the second message.
package outbox
