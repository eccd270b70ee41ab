// Package inboxstore stores the ids of handled messages, and what is recorded about
// failing ones.
package inboxstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed migrations postgresql sqlite
var files embed.FS

// Migrations create the tables inbox, with its seal, inbox_failures, inbox_sequences and
// inbox_refused.
var Migrations = statements.Migrations(files)

// The errors of a Store, besides those of the database. They are public in package inbox.
var (
	ErrBeingHandled = errors.New("inbox: the message is being handled elsewhere")
	ErrTxEnded      = errors.New("inbox: the transaction has ended")
	ErrUnsealed     = errors.New("inbox: SQLite's foreign keys are off; open the database with oncemill.SQLiteDSN")
)

// Store is the database access of a consumer. An attempt to handle a message consists of
// Begin, Claim, the handler's statements, Seal, and the commit. It is safe for concurrent
// use.
type Store interface {
	Claims
	Failures
	Sequences

	// CountRefused counts n refused messages of a topic and a reason, and returns
	// approximately how many there were within a time.
	CountRefused(ctx context.Context, tx *sql.Tx, topic, reason string, n int, within time.Duration) (int64, error)

	// Purge removes at most limit ids that are past retention, and as many failure records
	// that are that old. The ids of dead letters stay. It looks at limit other failure
	// records, each time at the next ones, and removes those of handled messages.
	Purge(ctx context.Context, retention time.Duration, limit int) (ids, failures int64, err error)

	// PurgeFailures is the part of Purge for failure records.
	PurgeFailures(ctx context.Context, retention time.Duration, limit int) (int64, error)

	// OldIDs returns at most limit ids that Purge would remove, the oldest first. It takes no
	// lock.
	OldIDs(ctx context.Context, retention time.Duration, limit int) ([]OldID, error)

	// DeleteIDs removes those of the ids that are still past retention, and returns how many.
	DeleteIDs(ctx context.Context, retention time.Duration, ids []OldID) (int64, error)
	// CountConsumer counts what there is of the consumer, up to so many of each kind.
	CountConsumer(ctx context.Context, most int) (ConsumerCount, error)

	// HandledAt returns when a message was handled, or declared dead; found is false if the
	// inbox does not know it.
	HandledAt(ctx context.Context, id string) (at time.Time, dead, found bool, err error)

	// Handled returns those of some ids whose messages were handled, without those that a dead
	// letter has taken.
	Handled(ctx context.Context, ids []string) ([]string, error)

	// Consumers returns all consumers that have ids or failure records, in order.
	Consumers(ctx context.Context) ([]string, error)

	// Ping checks whether the database can be reached.
	Ping(ctx context.Context) error

	// Now returns the database's time.
	Now(ctx context.Context) (time.Time, error)

	// Writers is how many transactions can write at the same time; 0 for any number.
	Writers() int
}

// OldID is an id that is past its retention.
type OldID struct {
	MessageID  string
	ReceivedAt time.Time
}

// Claims takes the ids of messages.
type Claims interface {
	// Begin begins a transaction. Where only one can write, it waits for its turn until ctx
	// ends; the error is ErrBeingHandled if another transaction does not end.
	Begin(ctx context.Context, calls *bounded.Calls) (*boundtx.Tx, error)

	// Claim inserts the id. False means that a committed transaction has it. It waits for
	// another transaction that holds the id, but not for long: then the error is
	// ErrBeingHandled. It is ErrUnsealed if the database could not refuse a commit by the
	// handler.
	Claim(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (bool, error)

	// Seal permits the database to commit. It is the last statement, and fails with
	// ErrTxEnded if tx is not the transaction that claimed the id.
	Seal(ctx context.Context, tx *sql.Tx, id string) error

	// ClaimGroup inserts ids, sorted and all different, for one transaction that does the
	// work of a group. It returns those that no committed transaction has. In this
	// transaction any wait for a lock is limited by Config.GroupLockTimeout.
	ClaimGroup(ctx context.Context, tx *sql.Tx, sorted []Claim) (claimed map[string]bool, err error)

	// SealGroup is Seal for what ClaimGroup claimed.
	SealGroup(ctx context.Context, tx *sql.Tx, claimed map[string]bool) error

	// LimitLockWait makes the statements before Claim wait for locks as long as Claim does.
	// The server ends a transaction whose client is silent, as after a claim.
	LimitLockWait(ctx context.Context, tx *sql.Tx) error

	// EndedBy reports whether a statement of the handler that failed with err also ended the
	// transaction, or tried to: nil if not.
	EndedBy(ctx context.Context, tx *sql.Tx, id string, err error) error

	// ConnectionLost reports whether the connection of tx is lost.
	ConnectionLost(ctx context.Context, tx *sql.Tx) bool

	// SameFingerprint compares fingerprint with that of the row that has the id. A row
	// without one counts as equal.
	SameFingerprint(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (bool, error)

	// MarkDead marks the row of an id, which this transaction has claimed, as that of a dead
	// letter.
	MarkDead(ctx context.Context, tx *sql.Tx, id string) error

	// Reopen removes the row of a dead letter, if there is one.
	Reopen(ctx context.Context, tx *sql.Tx, id string) error
}

// Failures records failing messages, and those that may have crashed a process.
type Failures interface {
	// RecordStart counts a start, unless the id is claimed; for a replay, unless it is
	// claimed and not by a dead letter.
	RecordStart(ctx context.Context, id string, replay bool) (Start, error)

	// RecordEnd ends a start. charged: Charge has counted it.
	RecordEnd(ctx context.Context, id string, charged bool) error

	// Charge counts a start during which nothing else is handled: if the process crashes, this
	// message is at fault. It returns how many such starts have not ended, 0 if the message has
	// been handled meanwhile.
	Charge(ctx context.Context, id string) (unended int, err error)

	// Discharge undoes what Charge has counted.
	Discharge(ctx context.Context, id string) error

	// RecordFailure counts a failed delivery and ends its start.
	RecordFailure(ctx context.Context, id string, f Failure) (Record, error)

	// FailedDeliveries returns how many deliveries of a message have failed: by itself, and
	// because what its handler needs was unavailable.
	FailedDeliveries(ctx context.Context, tx *sql.Tx, id string) (failures, unavailable int, err error)
	// DeleteFailures removes what is recorded about a message.
	DeleteFailures(ctx context.Context, tx *sql.Tx, id string) error
}

// Sequences enforces the order of keys.
type Sequences interface {
	// Advance moves the sequence of a key to seq if that is the next one, or with skip any
	// later one. The key stays locked until the end of the transaction.
	Advance(ctx context.Context, tx *sql.Tx, key string, seq int64, skip bool) (Position, error)

	// Retried reports whether a message of the key before seq has failed and is to be
	// delivered again, or was due for that no longer than wait ago.
	Retried(ctx context.Context, tx *sql.Tx, key string, seq int64, wait time.Duration) (bool, error)
}

// Open returns the store of a consumer. cfg is resolved.
func Open(db *sql.DB, where database.Database, cfg Config) Store {
	if where.Dialect == oncemill.SQLite {
		return newSQLite(db, where, cfg)
	}
	return newPostgres(db, where, cfg)
}
