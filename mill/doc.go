// Package mill assembles what a service uses of oncemill. [New] builds the outbox, the relay,
// the inboxes, the dead letters with their replays, and the idempotency keys, with settings
// that fit each other, and reports settings that are missing or invalid. [Mill.Run] creates the
// tables that are used, runs all of it, and stops it in the right order.
//
//	m, err := mill.New(db, mill.Config{
//		Outbox:      &outbox.Config{},
//		Sink:        sink, // relay/rabbitmq.New
//		Idempotency: &idempotency.Config{Scope: scope},
//		Consumers: []mill.Consumer{{
//			Name:       "stock",
//			Topic:      "orders",
//			Subscriber: subscribe, // inbox/rabbitmq.New
//			Handler:    reserve,
//		}},
//	})
//	if err != nil {
//		return err
//	}
//	mux.Handle("POST /orders", m.Idempotency().TxMiddleware(placeOrder))
//	return m.Run(ctx, m.Serve(&http.Server{Addr: ":8080", Handler: mux}))
//
// Each part is a building block of its own, described by its package; the mill adds nothing
// to what they do. A service that needs another arrangement uses them without it.
package mill
