// Package inboxtest tests handlers behind an inbox. It delivers messages the way brokers
// do when things go wrong: twice, in several copies at once, again after a crash, and
// again after the connection to the database was lost around the commit.
//
//	func TestReserve(t *testing.T) {
//		in, err := inbox.New(db, inbox.Config{Consumer: "stock", Outbox: box})
//		...
//		inboxtest.Run(t, inboxtest.Test{
//			Middleware: in.Middleware,
//			Handler:    reserve,
//			NewMessage: func() *message.Message { return message.NewMessage(watermill.NewUUID(), payload) },
//			Effects:    func() int { return countReservations(t, db) },
//			Outbox:     box,
//			Topic:      "reservations",
//		})
//	}
//
// [Run] fails the test unless every message has exactly one effect, and the messages that
// the handler returns are in the outbox exactly once. A crash is simulated by ending the
// goroutine of the delivery, at the points where the end of a process would matter. It
// cannot show what happens to effects outside the transaction.
package inboxtest
