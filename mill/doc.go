// Package mill assembles a service from the parts of oncemill. [New] builds the outbox, the
// relay, the inboxes, the dead letters with their replays, and the idempotency keys. It makes
// their settings fit each other, and reports settings that are missing or invalid. [Mill.Run]
// creates the tables that are used, runs all parts, and stops them in the right order.
//
//	m, err := mill.New(db, mill.Config{
//		Outbox:      &outbox.Config{},
//		Sink:        sink, // relay/rabbitmq.New
//		Idempotency: &idempotency.Config{Scope: scope},
//		Consumers: []mill.Consumer{{
//			Name:       "stock",
//			Topic:      "orders",
//			Subscriber: rabbitmq.Queue(uri, "stock", rabbitmq.Config{}), // of inbox/rabbitmq
//			Handler:    inbox.Handle(inbox.JSON, reserve),
//			Produces:   "reservations", // where the messages go that reserve returns
//		}},
//	})
//	if err != nil {
//		return err
//	}
//	mux.Handle("POST /orders", m.Idempotency().TxMiddleware(placeOrder))
//	return m.Run(ctx, m.Serve(&http.Server{Addr: ":8080", Handler: mux}))
//
// What a consumer cannot handle becomes a dead letter, which an operator can replay.
//
// Several processes may each have a Mill on the same database, for example one with
// Idempotency and one with Consumers. All that have a Sink share the lanes of the outbox:
// each relays messages of all of them. They may start at the same time. Use the same
// Database, Outbox.History and Relay.Lease in all of them.
//
// Each part is a building block that its package describes. A service that needs another
// arrangement uses them without a Mill.
package mill
