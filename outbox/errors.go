package outbox

import (
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

var (
	// ErrNoTx is returned for a nil transaction, and by a context-bound publisher if the
	// message's context carries none. Put the transaction into the context with
	// oncemill.ContextWithTx. Or publish inside RunInTx or an inbox handler, with a
	// message whose context is theirs (message.SetContext).
	ErrNoTx = errors.New("outbox: no transaction; pass one, or put it into the message's context (oncemill.ContextWithTx, msg.SetContext)")

	// ErrMixedTx is returned if messages of one Publish carry different transactions.
	// Publish the messages of each transaction in a separate call. It is also returned
	// for several messages in a transaction whose type cannot be compared: put a
	// pointer to it into the context, or use Outbox.Publisher.
	ErrMixedTx = errors.New("outbox: messages of one Publish carry different transactions")

	// ErrCommitUnknown is returned by RunInTx when it has sent the commit and got no
	// answer: the connection was lost, or Config.CommitTimeout has passed. The
	// transaction, with its messages, may or may not have committed, or may still
	// commit. Check your own rows before you retry, or retry with the same message ids,
	// which the consumers' inboxes recognize.
	ErrCommitUnknown = errors.New("outbox: outcome of the commit is unknown")

	// ErrEmptyFilter is returned by History.Count and History.Resend for a filter
	// without a condition. To resend the whole history, set a From or a To.
	ErrEmptyFilter = errors.New("outbox: the filter of the history is empty; set what is to be sent again")

	// ErrSequenceBehind is returned by a relay at its start if the id sequence is below
	// an id that is in use, for example after a logical replication or a partial
	// restore. New rows would take ids of old ones. Run "oncemill repair-sequence",
	// which locks writers out while it sets the sequence.
	ErrSequenceBehind = outboxstore.ErrSequenceBehind

	// ErrReadOnly is returned by a relay at its start if its database accepts no
	// writes: a standby, or a role or database with default_transaction_read_only.
	// Connect to the primary, or promote the standby, and start the relay again. A
	// running relay logs the condition, publishes nothing once its leases have expired,
	// and resumes when the server accepts writes.
	ErrReadOnly = errors.New("outbox: the database is read-only; connect to the primary, or promote this server")

	// ErrSequenceCached is returned by a relay at its start if the id sequence has a
	// cache above 1. Sessions would take ids in blocks, and the order of a key would be
	// lost. Set it with alter sequence ... cache 1.
	ErrSequenceCached = errors.New("outbox: the id sequence has a cache above 1; run alter sequence with cache 1")
)

// MessageError names the message and the field that cannot be published. Nothing of the
// call has been sent to the database.
type MessageError struct {
	Index     int    // position in the arguments of Publish
	MessageID string // its UUID, made printable
	Field     string // "topic", "id", "key", "payload", "metadata", "deliver_at", "deliver_after" or "message"
	Problem   string // what is wrong and what would be right
}

func (e *MessageError) Error() string {
	return fmt.Sprintf("outbox: message %d (id %q): %s %s", e.Index, e.MessageID, e.Field, e.Problem)
}

// FilterError describes what is wrong with a HistoryFilter. Nothing has been sent to
// the database.
type FilterError struct {
	Field   string
	Problem string // what is wrong and what would be right
}

func (e *FilterError) Error() string {
	return fmt.Sprintf("outbox: history filter: %s %s", e.Field, e.Problem)
}
