package outbox

import (
	"errors"
	"fmt"
)

var (
	// ErrNoTx is returned by Publish for a transaction that is nil, and by a
	// context-bound publisher when the message's context carries none. Put it there
	// with oncemill.ContextWithTx, or publish inside RunInTx or an inbox handler, with
	// a message whose context is theirs (message.SetContext).
	ErrNoTx = errors.New("outbox: no transaction; give Publish one, or put it into the message's context (oncemill.ContextWithTx, msg.SetContext)")

	// ErrMixedTx is returned when messages of one Publish carry different
	// transactions. Publish each transaction's messages in a call of its own. It is
	// also returned for several messages in a transaction whose type cannot be
	// compared: put a pointer to it into the context, or use Outbox.Publisher.
	ErrMixedTx = errors.New("outbox: messages of one Publish carry different transactions")

	// ErrCommitUnknown is returned by RunInTx when it has sent the commit and got no
	// answer: the connection was lost, or Config.CommitTimeout has passed. The
	// transaction, with its messages, may or may not have committed, or may still
	// commit. Look your own rows up before doing it again, or do it again with the
	// same message ids, which the consumers' inboxes recognise.
	ErrCommitUnknown = errors.New("outbox: outcome of the commit is unknown")

	// ErrEmptyFilter is returned by History.Count and History.Resend for a filter
	// that has no condition: the whole history is sent again by asking for it,
	// with a From or a To.
	ErrEmptyFilter = errors.New("outbox: the filter of the history is empty; set what is to be sent again")

	// ErrNoAnswer is returned by Queue.Archive when the database gave no answer in
	// time. What was under way may have taken effect.
	ErrNoAnswer = errors.New("outbox: no answer from the database")

	// ErrSequenceBehind is returned by a relay at its start when the sequence
	// of ids lies below an id that is in use, as after a logical replication
	// or a partial restore: new rows would take ids of old ones. Run
	// "oncemill repair-sequence", which locks writers out while it sets it.
	ErrSequenceBehind = errors.New("outbox: the id sequence is behind its rows; run oncemill repair-sequence")

	// ErrReadOnly is returned by a relay at its start when its database takes no
	// writes: a standby, or a role or database with default_transaction_read_only.
	// Connect it to the primary, or promote the standby, and start it again. A relay
	// at work that meets one logs it, publishes nothing once its leases have run
	// out, and goes on when the server takes writes.
	ErrReadOnly = errors.New("outbox: the database is read-only; connect to the primary, or promote this server")

	// ErrSequenceCached is returned by a relay at its start when the sequence
	// of ids has a cache above 1: sessions would hand ids out in blocks, and
	// the order of a key would be lost. Set it with alter sequence ... cache 1.
	ErrSequenceCached = errors.New("outbox: the id sequence has a cache above 1; run alter sequence with cache 1")
)

// MessageError names the message and the field that cannot be published.
// Nothing of the call has been sent to the database.
type MessageError struct {
	Index     int    // position in the arguments of Publish
	MessageID string // its UUID, as far as it can be shown
	Field     string // "topic", "id", "key", "payload", "metadata", "deliver_at", "deliver_after" or "message"
	Problem   string // what is wrong and what would be right
}

func (e *MessageError) Error() string {
	return fmt.Sprintf("outbox: message %d (id %q): %s %s", e.Index, e.MessageID, e.Field, e.Problem)
}

// FilterError names what is wrong with a HistoryFilter. Nothing has been sent to
// the database.
type FilterError struct {
	Field   string
	Problem string // what is wrong and what would be right
}

func (e *FilterError) Error() string {
	return fmt.Sprintf("outbox: history filter: %s %s", e.Field, e.Problem)
}
