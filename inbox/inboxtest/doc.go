// Package inboxtest helps to test handlers behind an inbox: it delivers messages
// as brokers do when things go wrong.
//
//	func TestReserve(t *testing.T) {
//		in, err := inbox.New(db, inbox.Config{Consumer: "stock"})
//		...
//		inboxtest.OneEffect(t, in.Middleware, reserve,
//			func() *message.Message { return message.NewMessage(watermill.NewUUID(), payload) },
//			func() int { return countReservations(t, db) })
//	}
//
// A crash is played by ending the goroutine of the delivery, at the places where
// the end of a process would matter. What it cannot show is what happens to
// effects that are not in the transaction.
package inboxtest
