// Package inbox applies the effects of each message once per consumer, over any
// Watermill subscriber that delivers at least once.
//
//	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Outbox: box})
//	...
//	router.AddHandler("reserve", "orders", subscriber, "reservations", box.ContextPublisher(), reserve).
//		AddMiddleware(in.Middleware)
//
//	func reserve(msg *message.Message) ([]*message.Message, error) {
//		tx, _ := inbox.TxFromContext(msg.Context())
//		_, err := tx.ExecContext(msg.Context(), `update stock set ...`)
//		if err != nil {
//			return nil, err
//		}
//		return []*message.Message{reserved}, nil // goes to the outbox
//	}
//
// The router's own publisher is not used. A context publisher in its place fails,
// and so shows it, where the middleware has been forgotten.
//
// # What it guarantees
//
// The id of the message, the effects of the handler and the messages it returns
// commit in one transaction, or none of them. The message is acknowledged after
// the commit. A copy of a message whose transaction has committed is
// acknowledged without running the handler; a copy that comes while the first is
// being handled waits a moment and then fails with [ErrBeingHandled], to be
// delivered again. A failed attempt, a panic, a crash leave nothing. If the
// connection is lost during the commit the attempt fails with
// [ErrCommitUnknown], and the redelivery finds the truth.
//
// The handler cannot end the transaction: its handle refuses, and what gets past
// the handle (a driver that rewrites statements, say) the database refuses to
// commit, since the id is sealed until the inbox's last statement.
//
// # What it does not
//
// Effects outside of the transaction are not covered: a mail that the handler
// sends, a second database, a message that it publishes to a broker directly, a
// statement on the *sql.DB. Nor is a handler that acknowledges the message
// itself, or one that attacks: that takes the raw connection (in a group it can roll
// back what is the others' too), sets oncemill.inbox, disables triggers, turns defer_foreign_keys off on SQLite, or
// forges the inbox's rows.
//
// A handler must return the errors of its statements. On PostgreSQL one failed
// statement fails the attempt anyway, unless the handler goes back to a
// savepoint. SQLite may end a transaction on an error; the handle notices, but
// not for statements that were prepared with it.
//
// Ids are kept for Config.Retention, if [Inbox.Run] runs. Messages without an id
// fail with [ErrNoMessageID].
//
// # When a handler fails
//
// A message is tried again in the process, then delivered again after a delay,
// then, with Config.DeadLetters, kept as a dead letter: see [Retry] for when and
// [Permanent], [RetryAfter] and [Unavailable] for what a handler can say. What is
// not the message's doing spends no attempt. A failure delays its message and its key, and
// nobody else. A message is
//
//	new           nothing is known of it
//	failing       it has a row in inbox_failures
//	handled       its id is in inbox, effects and produced messages are committed
//	dead          its id is in inbox, marked, and it has a letter
//	refused       its signature or encoding is bad: it has a letter, or is counted, and
//	              its id is nobody's
//
// and a replay of its letter makes a dead one new, for one consumer, once.
//
// # Throughput
//
// [Inbox.GroupMiddleware] lets messages share a transaction. Its group size adapts
// to contention. [Inbox.Batch] calls a handler once for all messages of a group.
package inbox
