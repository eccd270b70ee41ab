package idempotency

import (
	"context"
	"time"
)

// State is the state of a claim. A key that was never used, that was released after a
// failed attempt, or that was purged, has no record and no state.
type State int

const (
	// StateStarted means that an owner runs the request, or died running it.
	StateStarted State = 1
	// StateCompleted means that the response is stored and will be replayed.
	StateCompleted State = 2
	// StateNotReplayable means that the request ran once, but its response was not stored.
	// It will not run again.
	StateNotReplayable State = 3
	// StateExpired means that the stored response has been deleted, and that its key is
	// still refused (Config.Expiry.RefuseFor).
	StateExpired State = 4
)

func (s State) String() string {
	switch s {
	case StateStarted:
		return "started"
	case StateCompleted:
		return "completed"
	case StateNotReplayable:
		return "not_replayable"
	case StateExpired:
		return "expired"
	}
	return "unknown"
}

// Owner is the right to complete a claim: a random token of one attempt, and a fence that
// each takeover increases.
type Owner struct {
	Token [16]byte
	Fence int64
}

// Caller is a hash of tenant and principal. It is used to count a caller's outstanding
// keys.
type Caller [16]byte

// Claim asks for the right to run a request.
type Claim struct {
	ID          ID
	Caller      Caller
	Fingerprint Fingerprint
	Token       [16]byte
	Endpoint    string // method and route, for operators

	Lease     time.Duration // until others may call this owner dead
	Retention time.Duration // of the claim itself; completing sets another

	// Durable claims survive a crash of the database server. Other claims may be lost in
	// one, unless the transaction of the effects has committed.
	Durable bool

	CorrelationID string
	TraceID       string
}

// Completion ends a claim.
type Completion struct {
	State     State // StateCompleted or StateNotReplayable
	Status    int   // of HTTP; 0 if there is none
	Response  []byte
	Large     bool          // the response is stored in the table of large ones
	Retention time.Duration // how long the response is replayed
	Refuse    time.Duration // how long after that the key is refused

	Location   string
	ResourceID string
}

// Record is what is stored for a key. Values that depend on the time are by the store's
// clock at the time of reading.
type Record struct {
	ID          ID
	Caller      Caller
	Fingerprint Fingerprint
	State       State
	Owner       Owner
	Endpoint    string
	Status      int
	Response    []byte

	Location      string
	ResourceID    string
	CorrelationID string
	TraceID       string

	LeaseLeft   time.Duration // of a started claim; 0 or less: its owner is dead or late
	ExpiresIn   time.Duration // until the response is no longer replayed
	CreatedAt   time.Time
	CompletedAt time.Time // zero until then

	plain []byte // the response, if it has been decoded
}

// Store keeps claims. All its methods must be safe for concurrent use, by many processes
// that share the store. An error other than those documented here means that the store
// could not be reached; the requested change may or may not have happened.
//
// The package storetest tests implementations.
type Store interface {
	// Claim claims the key if it has no record, or one that is due for purging. granted
	// reports whether it did. Then the record is the new one, otherwise the one that
	// prevents the claim. Claim never waits for others, except, on SQLite, for the one
	// writer.
	Claim(ctx context.Context, claim Claim) (record Record, granted bool, err error)

	// TakeOver gives a started claim whose lease has ended, and which from still owns, to a
	// new owner with a higher fence. granted is false if another owner was faster, or the
	// lease was extended.
	TakeOver(ctx context.Context, claim Claim, from Owner) (record Record, granted bool, err error)

	// Find returns the record of a key. It waits for no writer. found is false for an absent
	// key and for one that is due for purging.
	Find(ctx context.Context, id ID) (record Record, found bool, err error)

	// Outstanding counts the started keys of a caller whose lease has not ended, up to
	// limit.
	Outstanding(ctx context.Context, caller Caller, limit int) (int, error)

	// Extend makes the lease of a started claim last until this long from now. Error:
	// ErrStaleOwner.
	Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) error

	// Complete ends a started claim, durably. Error: ErrStaleOwner.
	Complete(ctx context.Context, id ID, owner Owner, completion Completion) error

	// Release deletes a started claim, so that the key may run again. Error:
	// ErrStaleOwner.
	Release(ctx context.Context, id ID, owner Owner) error

	// Purge deletes up to limit records that are past retention, and the responses of up to
	// limit records that have expired. It never touches a started claim whose lease is
	// running. It returns how many records it changed.
	Purge(ctx context.Context, limit int) (int, error)
}

// Cache keeps completed records closer than the store. Correctness does not depend on it:
// it never grants the right to run, and losing it only costs speed. It handles its own
// errors; if it cannot answer, it returns false.
type Cache interface {
	Get(ctx context.Context, id ID) (Record, bool)
	// Put keeps a record for at most its ExpiresIn.
	Put(ctx context.Context, record Record)
}
