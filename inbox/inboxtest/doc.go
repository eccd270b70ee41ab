// Package inboxtest helps to test handlers behind an inbox. It delivers messages the way
// brokers do when things go wrong.
//
//	func TestReserve(t *testing.T) {
//		in, err := inbox.New(db, inbox.Config{Consumer: "stock"})
//		...
//		inboxtest.OneEffect(t, in.Middleware, reserve,
//			func() *message.Message { return message.NewMessage(watermill.NewUUID(), payload) },
//			func() int { return countReservations(t, db) })
//	}
//
// A crash is simulated by ending the goroutine of the delivery, at the points where the
// end of a process would matter. It cannot show what happens to effects outside the
// transaction.
package inboxtest
