// Package inbox applies the effects of each message once per consumer, over any Watermill
// subscriber that delivers at least once.
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
// The router's own publisher is not used. Pass a context publisher in its place: it fails
// when the middleware has been forgotten, so the mistake is visible.
//
// # What it guarantees
//
// The id of the message, the effects of the handler and the messages it returns commit in
// one transaction, or none of them do. The message is acknowledged after the commit. A
// copy of a message whose transaction has committed is acknowledged without running the
// handler. A copy that arrives while the first is being handled waits a moment, then fails
// with [ErrBeingHandled] and is delivered again. A failed attempt, a panic or a crash
// leaves nothing behind. If the connection is lost during the commit, the attempt fails
// with [ErrCommitUnknown]; the redelivery finds out what happened.
//
// The handler cannot end the transaction: its handle refuses. If something gets past the
// handle (for example a driver that rewrites statements), the database refuses to commit,
// because the id is sealed until the inbox's last statement.
//
// # What it does not guarantee
//
// Effects outside the transaction are not covered: an email that the handler sends, a
// second database, a message that it publishes directly to a broker, a statement on the
// *sql.DB. A hostile handler is not covered either: one that takes the raw connection (in a
// group it can also roll back the effects of others), sets oncemill.inbox, disables
// triggers, turns defer_foreign_keys off on SQLite, or forges the inbox's rows.
//
// A handler must return the errors of its statements. On PostgreSQL one failed statement
// fails the attempt anyway, unless the handler rolls back to a savepoint. SQLite may end a
// transaction on an error; the handle notices this, except for statements that were
// prepared with it.
//
// Ids are kept for Config.Retention, provided that [Inbox.Run] runs. Messages without an
// id fail with [ErrNoMessageID].
//
// # When a handler fails
//
// A message is first tried again in the process, then delivered again after a delay. With
// Config.DeadLetters it is then kept as a dead letter. See [Retry] for the schedule, and
// [Permanent], [RetryAfter] and [Unavailable] for the errors with which a handler can
// influence it. A failure that is not caused by the message uses up no attempt. A failure
// delays its message and the messages of its key, and no others. A message is
//
//	new           nothing is known of it
//	failing       it has a row in inbox_failures
//	handled       its id is in inbox, effects and produced messages are committed
//	dead          its id is in inbox, marked, and it has a dead letter
//	refused       its signature or encoding is bad: it becomes a dead letter, or is
//	              counted, and takes no id
//
// A replay of its dead letter makes a dead message new, for one consumer, once.
//
// # Pauses
//
// An operator can pause a consumer (package steer, oncemill pause consumer). While it is paused,
// deliveries are held unanswered for up to 20 minutes, or until their context ends or their
// subscriber stops (if it says so, see [Delivery]); then they fail with [ErrPaused], which is no failure of the message. Replays wait. A message that is being
// handled is finished. The name of an inbox pauses the handlers of [Inbox.PerHandler], too. What is
// paused is read at most once a second, by deliveries. If that fails, what was read last applies;
// before the first read, nothing is handled. Without the tables of package steer nothing is paused.
//
// # Throughput
//
// [Inbox.GroupMiddleware] lets messages share a transaction. Its group size adapts to
// contention. [Inbox.Batch] calls a handler once for all messages of a group.
package inbox
