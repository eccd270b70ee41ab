package idempotency

import (
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
)

var (
	// ErrNotTransactional is the value that [Engine.TxMiddleware] panics with when the store
	// is not a [SQLStore]. It panics when called to wrap a handler, before any request. Use
	// a SQLStore, or Engine.Middleware.
	ErrNotTransactional = errors.New("idempotency: the store has no transactions; use a SQLStore, or Engine.Middleware")

	// ErrStaleOwner means that another owner has taken over the claim, or that it was
	// already completed. Nothing was changed. Roll back the transaction in which it is
	// returned, together with its effects.
	ErrStaleOwner = errors.New("idempotency: another owner has the claim")

	// ErrTooManyOutstanding is returned by [Do] when the caller already has as many started
	// keys as it may have (Config.Keys.MaxOutstanding). Nothing was claimed.
	ErrTooManyOutstanding = errors.New("idempotency: too many keys outstanding")

	// ErrInTransaction is returned by [Do] on a [SQLStore] when its context carries a
	// transaction. Do's own transaction would commit separately, and on SQLite would wait
	// for the other until it times out. Write in the existing transaction, or call Do
	// outside it.
	ErrInTransaction = errors.New("idempotency: Do cannot be called in a transaction; call it before or after")

	// ErrContended is returned by [Do] when every try lost against other transactions.
	// Nothing happened. Call Do again.
	ErrContended = errors.New("idempotency: every try lost against other transactions")

	// ErrTooLarge is returned by a handler wrapped by [Engine.Watermill] when the messages that
	// it produced in a transaction take more than 64 MiB. Nothing happened. (Without a
	// transaction they are returned once.)
	ErrTooLarge = errors.New("idempotency: the result is too large to be stored")

	// ErrTxEnded is returned by a transaction handle whose transaction is over: the handler
	// has returned (do not keep the handle), its time is up, or the database ended the
	// transaction on its own.
	ErrTxEnded = errors.New("idempotency: the transaction has ended")

	// ErrTxShared is returned by a transaction handle for a statement that changes a
	// setting (SET, RESET, set_config) or makes a temporary table, when the transaction is shared with other
	// requests (Config.Transactions.GroupSize). The handler runs again in a transaction
	// of its own, where the statement is allowed.
	ErrTxShared = errors.New("idempotency: the transaction is shared; the handler runs again in one of its own, where that is allowed")

	// ErrUnsealed is returned on SQLite when foreign keys are off, because the database
	// could not refuse a commit by the handler. Open it with oncemill.SQLiteDSN, or set the
	// pragma foreign_keys on every connection.
	ErrUnsealed = errors.New("idempotency: SQLite's foreign keys are off; open the database with oncemill.SQLiteDSN")

	// ErrStreaming is returned by Flush (of http.ResponseController) while a response is
	// recorded: it cannot be sent before it is stored. In Engine.Middleware,
	// Config.Responses.AllowStreaming permits flushing and makes the key not replayable.
	ErrStreaming = errors.New("idempotency: the response is recorded and cannot be flushed")

	// ErrHijack is returned by Hijack, because there would be no response to store.
	ErrHijack = errors.New("idempotency: the connection of an idempotent request cannot be hijacked")

	// ErrInProgress is returned by [Do] while the same command runs elsewhere. Try again
	// later.
	ErrInProgress = errors.New("idempotency: the command is in progress; try again later")

	// ErrOutcomeUnknown is returned by [Do] on a store without transactions when this or an
	// earlier run failed without calling [NoEffect], or its process died. Find out what
	// happened, or set Config.Failures.Crashed.
	ErrOutcomeUnknown = errors.New("idempotency: the outcome of an earlier run is unknown; find out what happened before you run it again")

	// ErrNotStored is returned by [Do] when the command has run, but its result was too
	// large to be stored.
	ErrNotStored = errors.New("idempotency: the command ran, but its result was not stored")

	// ErrKeyReused is returned by [Do] when the key was used with a different payload.
	ErrKeyReused = errors.New("idempotency: the key was used with another payload")

	// ErrKeyExpired is returned by [Do] when the key was used so long ago that its result
	// has been deleted, and Config.Expiry.RefuseFor prevents it from running again.
	ErrKeyExpired = errors.New("idempotency: the key has expired")

	// ErrNotUnknown is returned by [Engine.Settle] and [Admin.Settle] for a key whose
	// outcome is not unknown.
	ErrNotUnknown = errors.New("idempotency: the key has no unknown outcome")

	// ErrKeyNotFound is returned by [Admin.Find] for a key that has no record: it was never
	// used, was released, or is purged.
	ErrKeyNotFound = errors.New("idempotency: no such key")

	// ErrKeyAmbiguous is returned by [Admin.Find] if several hashes begin with these digits.
	// Give more of them.
	ErrKeyAmbiguous = errors.New("idempotency: several keys begin with these digits; give more of them")

	// ErrKeyRunning is returned by an act of an [Admin] on a key that is running. Nothing was
	// changed. Wait until its lease has ended.
	ErrKeyRunning = errors.New("idempotency: the key is running; wait until its lease has ended")

	// ErrKeyChanged is returned by an act of an [Admin] on a key that is no longer as it was
	// seen, or that another transaction is changing. Nothing was changed. Look at it again.
	ErrKeyChanged = errors.New("idempotency: the key has changed, or is just being changed; look at it again")

	// ErrNoActor is returned for an Act without By. Nothing was done.
	ErrNoActor = errors.New("idempotency: Act.By is required")

	// ErrNoReason is returned for an Act without Reason. Nothing was done.
	ErrNoReason = errors.New("idempotency: Act.Reason is required")

	// ErrNoAudit is returned for every act of an [Admin] if the table of the audit does not
	// exist. Nothing was done. Pass audit.Migrations to oncemill.Migrate.
	ErrNoAudit = auditstore.ErrNotMigrated

	// ErrCommitUnknown is returned by [Do] when the connection was lost between sending the
	// commit and reading its answer, and the database could not be queried. The claim stays;
	// calling Do again with the same key finds out.
	ErrCommitUnknown = errors.New("idempotency: outcome of the commit is unknown; call again with the same key")

	// ErrDecode means that a stored response cannot be read: it was encrypted with a key
	// that is not in Config.Responses.Encryption, or the row is damaged.
	ErrDecode = errors.New("idempotency: the stored response cannot be read")

	// ErrNotEncrypted means that a stored response is not encrypted, although
	// Config.Responses.Encryption is set: it was stored before that, or forged. See
	// Encryption.AcceptPlain.
	ErrNotEncrypted = fmt.Errorf("%w: it is not encrypted", ErrDecode)
)

// KeyError means that an Idempotency-Key cannot be used. It never contains the key.
type KeyError struct {
	Problem string // completes the sentence "the key ..."
}

func (e *KeyError) Error() string { return "idempotency: the key " + e.Problem }

// RecoveryError is returned by [Engine.Settle] for a Recovery that cannot be sent to a
// client. Nothing was changed; call again with a valid one. (The return value of
// Config.Failures.Recover is checked in the same way. Then the outcome stays unknown, and the
// reason is logged.)
type RecoveryError struct {
	Field   string // of Recovery
	Problem string // completes the sentence "the field ..."
}

func (e *RecoveryError) Error() string {
	return "idempotency: Recovery." + e.Field + " " + e.Problem
}

// QuotaError is returned by [Do] when the caller has used up its quota
// (Config.Keys.Quota). Nothing was claimed.
type QuotaError struct {
	RetryIn time.Duration // until the window ends
}

func (e *QuotaError) Error() string {
	return "idempotency: the caller's quota is used up; try again in " + e.RetryIn.Round(time.Second).String()
}

// RateLimitError is the error of Config.Keys.RateLimit for a request that is to be refused.
// It is answered with 429, and returned by [Do].
type RateLimitError struct {
	RetryAfter time.Duration // Default: Config.Answers.RetryAfter
	Detail     string        // for the client. Default: that of the problem
}

func (e *RateLimitError) Error() string { return "idempotency: rate limited: " + e.Detail }

// badValue returns the error for a field of Config.
func badValue(field, value, problem string) error {
	return &oncemill.ConfigError{Field: "idempotency.Config." + field, Value: value, Problem: problem}
}
