package inbox

import (
	"errors"
	"fmt"
)

var (
	// ErrNoMessageID is returned for a message without an id: such messages
	// would all look like one. Nothing was sent to the database. Have the
	// producer set the Watermill UUID or the AMQP message id, or set Config.ID.
	ErrNoMessageID = errors.New("inbox: the message has no id")

	// ErrBeingHandled is returned when the id could not be claimed because
	// another transaction holds it, as a copy that is being handled elsewhere
	// does, or because that transaction has just committed it under an
	// isolation level that does not show it here. It says nothing about the
	// message. The redelivery finds the truth; delay it if you can.
	ErrBeingHandled = errors.New("inbox: the message is being handled elsewhere")

	// ErrNoDeadLetters is returned by Refuse when Config.DeadLetters is not set.
	ErrNoDeadLetters = errors.New("inbox: there is nowhere to put dead letters; set Config.DeadLetters")

	// ErrConflict is the failure of a message whose id was used for another one:
	// their fingerprints differ (Config.Fingerprint). The producer gives an id
	// out twice, or somebody forges messages.
	ErrConflict = errors.New("inbox: the id belongs to another message, with another fingerprint")

	// ErrUnverified is the failure of a message that Config.Verify refused. The
	// reason is wrapped with it.
	ErrUnverified = errors.New("inbox: the message was not verified")

	// ErrTooOld is the failure of a message that is older than Config.Retention,
	// less a margin of an hour (or a tenth, if that is shorter): if it had been
	// handled before, its id might be forgotten. Look at its effects, then replay
	// its letter or discard it.
	ErrTooOld = errors.New("inbox: the message is older than ids are kept")

	// ErrCrashed is the failure of a message during which the process ended too
	// often (Retry.Crashes).
	ErrCrashed = errors.New("inbox: processes that handle the message end")

	// ErrNoInbox is returned by a handler of Handle that runs without a
	// transaction: add the middleware of an inbox to it.
	ErrNoInbox = errors.New("inbox: no transaction in the context of the message; add the middleware of an inbox")

	// ErrNoHandler is returned where PerHandler is used outside of a router, or
	// before a middleware that takes the context of the message away.
	ErrNoHandler = errors.New("inbox: the message does not come through a router; use Middleware")

	// ErrGap is the failure of a message that has come before its predecessor;
	// see Config.Sequence. It is no attempt.
	ErrGap = errors.New("inbox: a message of the key before this one has not come")

	// ErrOvertaken is the failure of a message that failed, and that a later one of its
	// key did not wait for any longer; see Config.Sequence. It becomes a dead letter.
	ErrOvertaken = errors.New("inbox: a later message of the key has been handled")

	// ErrShared is returned by a transaction that a group shares for a statement that
	// changes settings (SET, RESET, set_config, PRAGMA): they would hold for the others
	// too. The message is then handled alone, where they are allowed.
	ErrShared = errors.New("inbox: a setting in a transaction that messages share")

	// ErrTxEnded is returned by a transaction handle whose transaction is over:
	// the handler has returned (do not keep the handle, do not use it from a
	// goroutine that outlives the handler), or the database ended the
	// transaction on its own, as SQLite does when it interrupts a statement.
	// The attempt is rolled back unless it had committed before.
	ErrTxEnded = errors.New("inbox: the transaction has ended")

	// ErrUnsealed is returned on SQLite when foreign keys are off: the database
	// could not refuse a commit by the handler. Open it with
	// oncemill.SQLiteDSN, or set the pragma foreign_keys on every connection.
	ErrUnsealed = errors.New("inbox: SQLite's foreign keys are off; open the database with oncemill.SQLiteDSN")

	// ErrNoOutbox is returned, and the attempt rolled back, when a handler
	// returns messages and Config.Outbox is not set.
	ErrNoOutbox = errors.New("inbox: the handler returned messages; set Config.Outbox")

	// ErrNoTopic is returned, and the attempt rolled back, when a handler
	// returns messages and nothing says where to. Add it to the router with
	// AddHandler, which takes a topic, or publish in the handler.
	ErrNoTopic = errors.New("inbox: the handler returned messages; add it to the router with a publish topic")

	// ErrCommitUnknown is returned when the commit was sent and there is no answer:
	// the connection was lost, or the server has not answered for 10 s. Id, effects and produced messages
	// have committed together or not at all. The redelivery finds the truth.
	ErrCommitUnknown = errors.New("inbox: outcome of the commit is unknown")
)

// MessageIDError means that an id cannot be kept. Nothing was sent to the
// database, and no redelivery will help.
type MessageIDError struct {
	MessageID string // shortened
	Problem   string // what is wrong and what would be right
}

func (e *MessageIDError) Error() string {
	return fmt.Sprintf("inbox: message id %q %s", e.MessageID, e.Problem)
}

// PayloadError means that a codec could not read a payload.
type PayloadError struct {
	Type string // wanted
	Err  error  // of the codec
}

func (e *PayloadError) Error() string { return "inbox: payload is no " + e.Type + ": " + e.Err.Error() }

// Unwrap returns the error of the codec.
func (e *PayloadError) Unwrap() error { return e.Err }
