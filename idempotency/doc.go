// Package idempotency runs a retried HTTP request, or command, once, and gives
// every retry the first answer, byte for byte. It follows
// draft-ietf-httpapi-idempotency-key-header and goes beyond it.
//
//	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{})
//	engine, err := idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant(), OnCommit: box.Wake})
//	mux.Handle("POST /orders", engine.TxMiddleware(http.HandlerFunc(placeOrder)))
//
//	func placeOrder(w http.ResponseWriter, r *http.Request) {
//		tx, _ := idempotency.TxFromContext(r.Context())
//		_, err := tx.ExecContext(r.Context(), `insert into orders ...`)
//		...
//		msg := message.NewMessageWithContext(r.Context(), idempotency.DeriveUUID(r.Context(), "placed"), payload)
//		err = publisher.Publish("orders", msg) // box.ContextPublisher()
//		w.WriteHeader(http.StatusCreated)
//	}
//
// # What it guarantees
//
// With [Engine.TxMiddleware] and [Do], on a [SQLStore]: the handler's writes in the
// transaction, what it publishes to the outbox there, and its response commit
// together, and only then is the response sent. So there is no moment at which the
// effect has happened and its answer is lost. Every retry with the same key gets
// that answer, from any process, also after a crash. A process that was stopped
// for longer than its lease, and wakes up when another has taken its key over,
// has its writes rolled back.
//
// The same key with another request is refused, the same key of another tenant or
// user is another key, and copies that come while the first is running are told
// so.
//
// # What it does not
//
// Effects outside of the transaction are not covered. With [Engine.Middleware], and with
// [Do] on another store, none is: they store what was answered, and after a crash, a panic,
// a 5xx, an error or a timeout they say that the outcome is unknown, unless the handler has
// declared that there was none ([NoEffect]).
//
// # States
//
// A key is absent, started (it has an owner, a fence and a lease), completed (with
// its response), not replayable (it ran, its response was too large or was
// streamed), or expired. A failed attempt without effect releases the key, which is absent
// again. Started with a lease that has ended is a key whose outcome is unknown, or in
// transactions one that may be taken over.
//
//	absent -> started -> completed -> (expired ->) absent
//	             |  \--> not replayable ---------> absent
//	             \-----> absent, if there was no effect and the answer is not stored
package idempotency
