// Package idempotency runs a retried HTTP request, or command, once, and gives every retry
// the first answer, byte for byte. It follows draft-ietf-httpapi-idempotency-key-header
// and goes beyond it.
//
//	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{})
//	engine, err := idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant(), OnCommit: box.Wake})
//	mux.Handle("POST /orders", engine.TxMiddleware(http.HandlerFunc(placeOrder)))
//
//	func placeOrder(w http.ResponseWriter, r *http.Request) {
//		tx, _ := idempotency.TxFromContext(r.Context())
//		_, err := tx.ExecContext(r.Context(), `insert into orders ...`)
//		...
//		msg := message.NewMessageWithContext(r.Context(), watermill.NewUUID(), payload)
//		err = publisher.Publish("orders", msg) // box.ContextPublisher()
//		w.WriteHeader(http.StatusCreated)
//	}
//
// # What it guarantees
//
// This holds with [Engine.TxMiddleware] and [Do], on a [SQLStore]. The handler's writes in
// the transaction, the messages it publishes to the outbox there, and its response commit
// together. Only then is the response sent, so there is no moment at which the effect has
// happened and its answer is lost. Every retry with the same key gets that answer, from
// any process, also after a crash. If a process was stopped for longer than its lease and
// resumes after another has taken over its key, its writes are rolled back.
//
// The same key with a different request is refused. The same key of another tenant or user
// is a different key. Copies that arrive while the first is running are answered that it
// is in progress.
//
// # What it does not guarantee
//
// Effects outside the transaction are not covered. With [Engine.Middleware], and with [Do]
// on another store, no effects are covered: only the answer is stored. After a crash, a
// panic, a 5xx, an error or a timeout they report that the outcome is unknown, unless the
// handler has declared that there was no effect ([NoEffect]).
//
// # Operating it
//
// [Admin] lists keys, stores the answer of one whose outcome is unknown, releases one, and
// erases those of a caller, each with an entry in the audit; oncemill keys does so from a
// shell. Config.Keys has limits for each caller, Config.Responses decides what of a response
// is stored, and Config.Expiry.Archive receives records before they are deleted.
//
// # States
//
// A key is absent, started (it has an owner, a fence and a lease), completed (with its
// response), not replayable (it ran, but its response was too large or was streamed), or
// expired. A failed attempt without effect releases the key, which is then absent again. A
// started key whose lease has ended has an unknown outcome; in transactions it may be
// taken over.
//
//	absent -> started -> completed -> (expired ->) absent
//	             |  \--> not replayable ---------> absent
//	             \-----> absent, if there was no effect and the answer is not stored
package idempotency
