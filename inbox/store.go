package inbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
)

// store is the database access of an inbox. An attempt consists of begin, claim, the
// handler's statements, seal, and the commit.
type store interface {
	begin(ctx context.Context, calls *bounded.Calls) (*boundtx.Tx, error)

	// claim inserts the id. False means that a committed transaction has it. It waits for
	// another transaction that holds the id, but not for long: then the error is
	// ErrBeingHandled.
	claim(ctx context.Context, tx *sql.Tx, id messageID, fingerprint []byte) (bool, error)

	// seal permits the database to commit. It is the last statement, and fails with
	// ErrTxEnded if tx is not the transaction that claimed the id.
	seal(ctx context.Context, tx *sql.Tx, id messageID) error

	// claimGroup inserts the ids, sorted and all different, for one transaction that does
	// the work of a group. It returns those that no committed transaction has. In this
	// transaction any wait for a lock is limited by the group's lock timeout.
	claimGroup(ctx context.Context, tx *sql.Tx, sorted []*member) (claimed map[string]bool, err error)

	// sealGroup is seal for what claimGroup claimed.
	sealGroup(ctx context.Context, tx *sql.Tx, claimed map[string]bool) error

	// lost reports whether a statement of the handler that failed with err also ended the
	// transaction: nil if not.
	lost(ctx context.Context, tx *sql.Tx, id messageID, err error) error

	// gone reports whether the connection of tx is lost.
	gone(ctx context.Context, tx *sql.Tx) bool

	// sameFingerprint compares fingerprint with that of the row that has the id. A row
	// without one counts as equal.
	sameFingerprint(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (bool, error)

	// patience makes the statements up to the claim wait for locks as long as the claim
	// does. The server ends a transaction whose client is silent, as after a claim.
	patience(ctx context.Context, tx *sql.Tx) error

	// reopen removes the row of a dead letter, if there is one.
	reopen(ctx context.Context, tx *sql.Tx, id messageID) error

	// markDead marks the row of an id as that of a dead letter.
	markDead(ctx context.Context, tx *sql.Tx, id string) error

	// advance moves the sequence of a key to seq if that is the next one, or with
	// skip any later one. The key stays locked.
	advance(ctx context.Context, tx *sql.Tx, key string, seq int64, skip bool) (place, error)

	// noteStart counts a start, unless the id is in the inbox; for a replay, unless it is
	// there and not that of a dead letter. The result is what to expect of the start.
	noteStart(ctx context.Context, id string, replay bool) (start, error)

	// charge counts a start alone, and returns how many have not ended.
	charge(ctx context.Context, id string) (alone int, err error)

	// noteEnd undoes what noteStart and charge have counted.
	noteEnd(ctx context.Context, id string, s start) error

	// discharge undoes what charge has counted.
	discharge(ctx context.Context, id string) error

	// recordFailure counts a failed delivery and ends its start.
	recordFailure(ctx context.Context, id string, s start, f failure) (record, error)

	// retried reports whether a message of the key before seq has failed and is to be
	// delivered again, or was due for that no longer than wait ago.
	retried(ctx context.Context, tx *sql.Tx, key string, seq int64, wait time.Duration) (bool, error)

	// countRefused counts refused messages, and returns approximately how many there were
	// within refusedFor.
	countRefused(ctx context.Context, tx *sql.Tx, o origin, n int) (int64, error)

	// forgetFailures removes the failure records of a message.
	forgetFailures(ctx context.Context, tx *sql.Tx, id string) error

	// prune removes at most limit ids that are past retention, and as many failure records
	// of messages that have been handled or are that old.
	prune(ctx context.Context, retention time.Duration, limit int) (ids, notes int64, err error)

	// ping checks whether the database can be reached.
	ping(ctx context.Context) error

	// now returns the database's time.
	now(ctx context.Context) (time.Time, error)
}

// failure is a delivery that failed.
type failure struct {
	text        string
	unavailable bool                       // what the handler needs
	uncounted   bool                       // it is no fault of the message
	key         string                     // with seq, the place of the message
	seq         *int64                     // nil if it has none
	again       func(record) time.Duration // until the next delivery
}

// record is what is stored about a failing message.
type record struct {
	failures    int
	unavailable int
	errors      []keptError
	again       time.Duration
}

// keptError is a failed delivery, as it is stored.
type keptError struct {
	At    time.Time `json:"at"`
	Error string    `json:"error"`
}

// mostErrors is how many failures of a message are stored in full.
const mostErrors = 10

// add appends a failure to those of a row, and returns the new content of the row.
func (r *record) add(kept string, now time.Time, text string) (string, error) {
	if err := json.Unmarshal([]byte(kept), &r.errors); err != nil {
		return "", fmt.Errorf("read former failures: %w", err)
	}
	r.errors = append(r.errors, keptError{At: now.UTC(), Error: textOf(text)})
	r.errors = r.errors[max(0, len(r.errors)-mostErrors):]
	encoded, err := json.Marshal(r.errors)
	return string(encoded), err
}

// messageID is the key of the inbox.
type messageID struct {
	consumer string
	message  string
}

func newStore(db *sql.DB, cfg Config) store {
	if cfg.Database.Dialect == oncemill.SQLite {
		return newSQLiteStore(db, cfg)
	}
	return newPostgresStore(db, cfg)
}

// expectOne turns the result of a seal into an error.
func expectOne(result sql.Result, err error) error {
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	sealed, err := result.RowsAffected()
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	if sealed != 1 {
		return ErrTxEnded
	}
	return nil
}
