// Package keystore stores idempotency keys in PostgreSQL or SQLite: the tables
// idempotency and idempotency_body, and the seal that keeps a handler from committing.
//
// Times are by the clock of the database. A method does one thing once: it does not
// retry, wait for longer than its context, or log.
package keystore

import (
	"context"
	"database/sql"
	"embed"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

// ID is the hash of scope and key.
type ID [32]byte

// State is the state of a claim. The numbers are those of the table.
type State int

// A key that may run has no record and no state.
const (
	StateStarted       State = 1 // an owner runs the request, or died running it
	StateCompleted     State = 2 // the response is stored
	StateNotReplayable State = 3 // it ran, and the response is not stored
	StateExpired       State = 4 // the response has been deleted
)

// Owner is the right to complete a claim. Each takeover increases the fence.
type Owner struct {
	Token [16]byte
	Fence int64
}

// Claim asks for a key.
type Claim struct {
	ID          ID
	Caller      [16]byte
	Fingerprint [33]byte
	Token       [16]byte
	Endpoint    string

	Lease     time.Duration
	Retention time.Duration
	Durable   bool // it survives a crash of the server; on SQLite every claim does

	CorrelationID string
	TraceID       string
}

// Completion ends a claim.
type Completion struct {
	State     State
	Status    int
	Response  []byte
	Large     bool          // the response goes into idempotency_body
	Retention time.Duration // until the response expires
	Refuse    time.Duration // from then until the record may be purged

	Location   string
	ResourceID string
}

// Completed is a claim with its completion.
type Completed struct {
	ID    ID
	Owner Owner
	Completion
}

// Record is a claim as it is stored.
type Record struct {
	ID          ID
	Caller      [16]byte
	Fingerprint [33]byte
	State       State
	Owner       Owner
	Endpoint    string
	Status      int
	Response    []byte

	Location      string
	ResourceID    string
	CorrelationID string
	TraceID       string

	LeaseLeft   time.Duration // 0 or less: it has ended
	ExpiresIn   time.Duration
	CreatedAt   time.Time
	CompletedAt time.Time // zero until then
}

// Traits are the differences between databases that callers plan by.
type Traits struct {
	// OneWriter means that write transactions run one after another.
	OneWriter bool

	// ClaimsTogether means that ClaimAll is supported.
	ClaimsTogether bool

	// SealsClaims means that a transaction is sealed by a write to each of its claims
	// (SealClaim), not by one for all (Seal).
	SealsClaims bool
}

// SealLimits are what PostgreSQL does with a transaction whose handler takes too long.
type SealLimits struct {
	Idle time.Duration // after this long without a statement it ends the transaction; 0: never
	Lock time.Duration // a statement fails after waiting this long for a lock; 0: as configured
}

// TxState is what a failed statement has left of its transaction.
type TxState int

// See [Store.AfterFailure].
const (
	TxOpen   TxState = iota // it can only be ended by its owner
	TxSealed                // the statement tried to commit, and the seal refused it
	TxGone                  // it was rolled back; later statements would be outside it
)

// Store is one database. Its methods are safe for concurrent use by many processes. An
// error means that the change may or may not have happened, unless the database reports
// that it has not.
type Store interface {
	Traits() Traits

	// Claim inserts a started record with fence 1 if the key has none, or returns the
	// existing one. found is false if the existing record was due for purging and has been
	// deleted; claim again then. It never waits for a handler; on SQLite it waits for the
	// turn to write, unless another owner has the key.
	Claim(ctx context.Context, claim Claim) (record Record, found bool, err error)

	// ClaimAll is Claim for several keys by one statement, none of them durable. The keys
	// must be sorted and different. See Traits.ClaimsTogether.
	ClaimAll(ctx context.Context, claims []Claim) (records []Record, found []bool, err error)

	// TakeOver gives a started claim that from owns, and whose lease has ended, to the
	// claim's token with the next fence. It returns the record afterwards, whoever owns it;
	// on PostgreSQL only if it is the new owner's.
	TakeOver(ctx context.Context, claim Claim, from Owner) (record Record, found bool, err error)

	// Find returns the record of a key. It waits for no writer. found is false for a record
	// that is due for purging.
	Find(ctx context.Context, id ID) (record Record, found bool, err error)

	// Outstanding counts the started claims of a caller whose lease has not ended, up to
	// limit.
	Outstanding(ctx context.Context, caller [16]byte, limit int) (int, error)

	// CountStarted counts the started claims of all callers, at most so many.
	CountStarted(ctx context.Context, most int) ([]StartedCount, error)

	// CountStored returns how many records there are: by the statistics of the server
	// (estimated), or counted up to most.
	CountStored(ctx context.Context, most int) (n int64, estimated bool, err error)

	// Extend makes the lease of a started claim end this long from now. owned is false, and
	// nothing was changed, unless the claim is started and owner's, and on PostgreSQL also
	// while another transaction has it locked.
	Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) (owned bool, err error)

	// Release deletes a started claim. owned is false, and nothing was changed, unless the
	// claim is started and owner's.
	Release(ctx context.Context, id ID, owner Owner) (owned bool, err error)

	// Complete ends a started claim, durably. owned is as for Release.
	Complete(ctx context.Context, id ID, owner Owner, c Completion) (owned bool, err error)

	// Purge deletes up to limit records that are past retention, and the responses of up to
	// limit records that have expired, and returns how many it changed. It never touches a
	// started claim whose lease is running. On SQLite it stops early when others wait to
	// write.
	Purge(ctx context.Context, limit int) (int, error)

	// Expire is the part of Purge for responses that have expired.
	Expire(ctx context.Context, limit int) (int, error)

	// Due returns up to limit of the records that Purge would delete, those that are due the
	// longest first. It takes no lock.
	Due(ctx context.Context, limit int) ([]Summary, error)

	// DeleteDue deletes records that Due has returned, unless they have changed since, and
	// returns how many. On SQLite it is in several transactions when others wait to write.
	DeleteDue(ctx context.Context, records []Summary) (int, error)

	// DueWithin reports whether a key has a record that Purge deletes within this time, unless
	// the record changes.
	DueWithin(ctx context.Context, id ID, within time.Duration) (bool, error)

	// Begin begins a transaction for handlers. isolation applies to PostgreSQL; SQLite is
	// always serializable.
	Begin(ctx context.Context, isolation sql.IsolationLevel) (*boundtx.Tx, error)

	// Seal makes the database refuse to commit tx until Finish or FinishAll. It does
	// nothing where Traits.SealsClaims is set.
	Seal(ctx context.Context, tx *sql.Tx, limits SealLimits) error

	// SealClaim does the same by a write to the claim, where Traits.SealsClaims is set, and
	// nothing elsewhere. owned is as for Release. enforced is false if the database is
	// configured not to refuse the commit.
	SealClaim(ctx context.Context, tx *sql.Tx, id ID, owner Owner) (owned, enforced bool, err error)

	// Finish completes a claim as the last statement of a sealed transaction, and permits
	// its commit. owned is false as for Release, or if the handler has ended the transaction.
	Finish(ctx context.Context, tx *sql.Tx, id ID, owner Owner, c Completion) (owned bool, err error)

	// FinishAll is Finish for several claims. It returns the positions of those that are not
	// owned. If there are any, tx must not be committed.
	FinishAll(ctx context.Context, tx *sql.Tx, all []Completed) (stale []int, err error)

	// AfterFailure returns what err, of a statement in a sealed transaction, has left of it.
	AfterFailure(ctx context.Context, tx *sql.Tx, id ID, err error) TxState

	// Aborted reports whether a statement has failed in tx, so that it can only be rolled
	// back. SQLite never aborts a transaction.
	Aborted(ctx context.Context, tx *sql.Tx) bool
}

//go:embed migrations postgresql sqlite
var files embed.FS

// Migrations are the folders of migrations.
var Migrations = statements.Migrations(files)

// Open returns the store of a database. It does no I/O. calls bounds the transactions of
// Begin. prepare prepares the statements that every request needs, once for each
// connection.
func Open(db *sql.DB, where database.Database, calls *bounded.Calls, prepare bool) Store {
	common := common{db: db, dialect: where.Dialect, calls: calls}
	if where.Dialect == oncemill.SQLite {
		s := &sqlite{common: common}
		statements.Load(&s.q, files, "sqlite", where.Names)
		s.prepared = newPrepared(db, prepare, s.q.Find, s.q.Seal)
		return s
	}
	s := &postgres{common: common}
	statements.Load(&s.q, files, "postgresql", where.Names)
	s.prepared = newPrepared(db, prepare, s.q.Claim, s.q.ClaimGroup, s.q.Find, s.q.Seal, s.q.Finish, s.q.FinishGroup)
	return s
}

// common is what both databases share.
type common struct {
	db       *sql.DB
	dialect  oncemill.Dialect
	calls    *bounded.Calls
	prepared *prepared
}

func (c *common) begin(ctx context.Context, options *sql.TxOptions) (*boundtx.Tx, error) {
	return boundtx.Begin(ctx, c.db, c.dialect, c.calls, options)
}
