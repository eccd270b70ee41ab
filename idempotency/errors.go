package idempotency

import (
	"errors"
	"fmt"
)

var (
	// ErrNotTransactional is what [Engine.TxMiddleware] panics with where the store
	// is no [SQLStore]: when it is called to wrap a handler, before any request.
	// Use a SQLStore, or Engine.Middleware.
	ErrNotTransactional = errors.New("idempotency: the store has no transactions; use a SQLStore, or Engine.Middleware")

	// ErrStaleOwner means that another owner has taken the claim over, or that it
	// was completed already. Nothing was changed. The effects of the transaction
	// in which it comes must be rolled back.
	ErrStaleOwner = errors.New("idempotency: another owner has the claim")

	// ErrTooManyOutstanding is returned by [Do] when the caller has as many
	// started keys as it may have (Config.MaxOutstanding). Nothing was claimed.
	ErrTooManyOutstanding = errors.New("idempotency: too many keys outstanding")

	// ErrInTransaction is returned by [Do] on a [SQLStore] when its context carries a
	// transaction: its own would commit apart from that one, and on SQLite wait for it
	// in vain. Write in the transaction that there is, or call Do outside of it.
	ErrInTransaction = errors.New("idempotency: Do cannot be called in a transaction; call it before or after")

	// ErrContended is returned by [Do] when every try lost against other transactions.
	// Nothing happened. Call again.
	ErrContended = errors.New("idempotency: every try lost against other transactions")

	// ErrTooLarge is returned by a handler behind [Engine.Watermill] when the messages that
	// it produced in a transaction take more than 64 MiB. Nothing happened. (Without a
	// transaction they are returned once.)
	ErrTooLarge = errors.New("idempotency: the result is too large to be stored")

	// ErrTxEnded is returned by a transaction handle whose transaction is over:
	// the handler has returned (do not keep the handle), its time is up, or the
	// database ended the transaction on its own.
	ErrTxEnded = errors.New("idempotency: the transaction has ended")

	// ErrTxShared is returned by a transaction handle for a statement that changes a
	// setting (SET, RESET, set_config), where the transaction is shared with other
	// requests (Config.GroupSize). The handler runs again in a transaction of its own,
	// which takes it.
	ErrTxShared = errors.New("idempotency: the transaction is shared; the handler runs again in one of its own, where settings may be changed")

	// ErrUnsealed is returned on SQLite when foreign keys are off: the database
	// could not refuse a commit by the handler. Open it with
	// oncemill.SQLiteDSN, or set the pragma foreign_keys on every connection.
	ErrUnsealed = errors.New("idempotency: SQLite's foreign keys are off; open the database with oncemill.SQLiteDSN")

	// ErrStreaming is returned by Flush (of http.ResponseController) while a
	// response is recorded: it cannot be sent before it is stored. In
	// Engine.Middleware, Config.AllowStreaming lets it through and makes the key
	// not replayable.
	ErrStreaming = errors.New("idempotency: the response is recorded and cannot be flushed")

	// ErrHijack is returned by Hijack: there would be no response to store.
	ErrHijack = errors.New("idempotency: the connection of an idempotent request cannot be hijacked")

	// ErrInProgress is returned by [Do] while the same command runs elsewhere.
	// Try again later.
	ErrInProgress = errors.New("idempotency: the command is in progress")

	// ErrOutcomeUnknown is returned by [Do] with a store that has no
	// transactions, when this or an earlier run failed without having called [NoEffect],
	// or died. Find out what happened, or set Config.Crashed.
	ErrOutcomeUnknown = errors.New("idempotency: the outcome of an earlier run is unknown")

	// ErrNotStored is returned by [Do] when the command has run, and its result
	// was too large to be stored.
	ErrNotStored = errors.New("idempotency: the command ran, but its result was not stored")

	// ErrKeyReused is returned by [Do] when the key was used with another
	// payload.
	ErrKeyReused = errors.New("idempotency: the key was used with another payload")

	// ErrKeyExpired is returned by [Do] when the key was used so long ago that
	// its result is gone, and Config.RefuseExpired keeps it from running again.
	ErrKeyExpired = errors.New("idempotency: the key has expired")

	// ErrNotUnknown is returned by [Engine.Settle] for a key whose outcome is not
	// unknown.
	ErrNotUnknown = errors.New("idempotency: the key has no unknown outcome")

	// ErrCommitUnknown is returned by [Do] when the connection was lost between
	// sending the commit and reading its answer, and the database could not be
	// asked. The claim stays; calling Do again with the same key finds out.
	ErrCommitUnknown = errors.New("idempotency: outcome of the commit is unknown")

	// ErrDecode means that a stored response cannot be read: it was encrypted
	// with a key that is not in Config.Encryption, or the row was damaged.
	ErrDecode = errors.New("idempotency: the stored response cannot be read")

	// ErrNotEncrypted means that a stored response is not encrypted, although
	// Config.Encryption is set: it was stored before, or forged. See
	// Encryption.AcceptPlain.
	ErrNotEncrypted = fmt.Errorf("%w: it is not encrypted", ErrDecode)
)

// KeyError means that an Idempotency-Key cannot be used. It never shows the key.
type KeyError struct {
	Problem string // completes the sentence "the key ..."
}

func (e *KeyError) Error() string { return "idempotency: the key " + e.Problem }

// RecoveryError is returned by [Engine.Settle] for a Recovery that no client could be
// answered with. Nothing was changed; call again with a valid one. (What Config.Recover
// returns is checked in the same way: the outcome then stays unknown, and the log says why.)
type RecoveryError struct {
	Field   string // of Recovery
	Problem string // completes the sentence "the field ..."
}

func (e *RecoveryError) Error() string {
	return "idempotency: Recovery." + e.Field + " " + e.Problem
}
