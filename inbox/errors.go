package inbox

import (
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/internal/inboxstore"
)

var (
	// ErrNoMessageID is returned for a message without an id, because all such messages
	// would look the same. Nothing of it was sent to the database. Have the producer set the
	// Watermill UUID or the AMQP message id, or set Config.ID.
	ErrNoMessageID = errors.New("inbox: the message has no id; set the Watermill UUID or Config.ID")

	// ErrBeingHandled is returned when the id could not be claimed because another
	// transaction holds it, for example a copy that is being handled elsewhere. It is also
	// returned when that transaction has just committed and the isolation level hides its
	// row here. The message is not at fault; the redelivery finds out what happened. Delay
	// it if you can.
	ErrBeingHandled = inboxstore.ErrBeingHandled

	// ErrPaused is returned for a delivery that was held for 20 min, or until its context
	// ended or its subscriber stopped, because an operator has paused its consumer (package steer). The message is not
	// at fault, nothing was counted, and it is to be delivered again. Delay it if you can.
	ErrPaused = errors.New("inbox: the consumer is paused")

	// ErrNoDeadLetters is returned by Refuse when Config.DeadLetters is not set.
	ErrNoDeadLetters = errors.New("inbox: dead letters are not configured; set Config.DeadLetters")

	// ErrConflict is the failure of a message whose id was already used for another message:
	// their fingerprints differ (Config.Fingerprint). Either the producer uses an id twice
	// or somebody forges messages.
	ErrConflict = errors.New("inbox: the id belongs to another message, with another fingerprint")

	// ErrUnverified is the failure of a message that Config.Verify refused. The reason is
	// wrapped with it.
	ErrUnverified = errors.New("inbox: the message was not verified")

	// ErrTooOld is the failure of a message that is older than Config.Retention, less a
	// margin of an hour (or a tenth, if that is shorter). If it was handled before, its id
	// may have been purged. Check whether its effects exist, then replay or discard its dead
	// letter.
	ErrTooOld = errors.New("inbox: the message is older than the retention of ids")

	// ErrCrashed is the failure of a message that has crashed its process too often
	// (Retry.Crashes).
	ErrCrashed = errors.New("inbox: the message has crashed its process too often")

	// ErrNoInbox is returned by a handler made by Handle that runs without a transaction.
	// Add the middleware of an inbox to it.
	ErrNoInbox = errors.New("inbox: no transaction in the context of the message; add the middleware of an inbox")

	// ErrNoHandler is returned when PerHandler is used outside a router, or before a
	// middleware that replaces the context of the message.
	ErrNoHandler = errors.New("inbox: the message does not come through a router; use Middleware")

	// ErrGap is the failure of a message that arrived before its predecessor; see
	// Config.Sequence. It uses up no attempt.
	ErrGap = errors.New("inbox: an earlier message of the key is missing")

	// ErrOvertaken is the failure of a retried message after a later message of its key was
	// handled; see Config.Sequence. The message becomes a dead letter.
	ErrOvertaken = errors.New("inbox: a later message of the key has been handled")

	// ErrShared is returned by a transaction that a group shares for a statement that
	// changes settings (SET, RESET, set_config, PRAGMA) or makes a temporary table, because
	// they would reach the other messages too. The message is then handled alone, where such
	// statements are allowed.
	ErrShared = errors.New("inbox: a shared transaction must not change settings or make temporary tables")

	// ErrTxEnded is returned by a transaction handle whose transaction is over. Either the
	// handler has returned (do not keep the handle or use it from a goroutine that outlives
	// the handler), or the database ended the transaction, as SQLite does when it interrupts
	// a statement. The attempt is rolled back unless it had already committed.
	ErrTxEnded = inboxstore.ErrTxEnded

	// ErrUnsealed is returned on SQLite when foreign keys are off, because the database
	// could not refuse a commit by the handler. Open it with oncemill.SQLiteDSN, or set the
	// pragma foreign_keys on every connection.
	ErrUnsealed = inboxstore.ErrUnsealed

	// ErrNoOutbox is returned when a handler returns messages and Config.Outbox is not set.
	// The attempt is rolled back.
	ErrNoOutbox = errors.New("inbox: the handler returned messages; set Config.Outbox")

	// ErrNoTopic is returned when a handler returns messages and there is no topic to
	// publish them to. The attempt is rolled back. Add the handler to the router with
	// AddHandler, which takes a topic, or publish in the handler.
	ErrNoTopic = errors.New("inbox: the handler returned messages; add it to the router with a publish topic")

	// ErrCommitUnknown is returned when the commit was sent but no answer arrived: the
	// connection was lost, or the server has not answered for 10 s. Id, effects and produced
	// messages have committed together or not at all. The redelivery finds out which.
	ErrCommitUnknown = errors.New("inbox: outcome of the commit is unknown")
)

// MessageIDError means that an id cannot be stored. Nothing was sent to the database, and
// a redelivery will not help.
type MessageIDError struct {
	MessageID string // shortened
	Problem   string // what is wrong and what would be right
}

func (e *MessageIDError) Error() string {
	return fmt.Sprintf("inbox: message id %q %s", e.MessageID, e.Problem)
}

// PayloadError means that a codec could not read a payload.
type PayloadError struct {
	Type string // the Go type to decode into
	Err  error  // of the codec
}

func (e *PayloadError) Error() string {
	return "inbox: decode payload as " + e.Type + ": " + e.Err.Error()
}

// Unwrap returns the error of the codec.
func (e *PayloadError) Unwrap() error { return e.Err }
