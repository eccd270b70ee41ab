// Package sqlerr classifies database errors of any driver.
package sqlerr

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
)

// SQLite's primary result codes about concurrency or the outcome of a commit.
const (
	sqliteError      = 1 // of a commit: SQLite has rolled the transaction back already
	sqliteBusy       = 5
	sqliteLocked     = 6
	sqliteReadOnly   = 8
	sqliteFull       = 13
	sqliteConstraint = 19
)

// State returns the five-character SQLSTATE of a PostgreSQL error, or "".
func State(err error) string {
	var pg interface{ SQLState() string } // *pq.Error and *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.SQLState()
	}
	return ""
}

// sqliteCode returns SQLite's primary result code, or 0.
func sqliteCode(err error) int {
	var lite interface{ Code() int } // *sqlite.Error of modernc.org/sqlite
	if errors.As(err, &lite) {
		return lite.Code() & 0xff
	}
	return 0
}

// Retryable reports whether the transaction lost against another one and can be run again:
// a serialization failure, a deadlock, a busy SQLite database.
func Retryable(err error) bool {
	switch State(err) {
	case "40001", "40P01":
		return true
	}
	switch sqliteCode(err) {
	case sqliteBusy, sqliteLocked:
		return true
	}
	return false
}

// Contended reports whether a statement failed because of another transaction: see
// [Retryable], or the other one held a lock for too long.
func Contended(err error) bool { return Retryable(err) || State(err) == "55P03" }

// TimedOut reports whether a statement has waited too long for a lock, or taken too long.
func TimedOut(err error) bool {
	switch State(err) {
	case "55P03", "57014":
		return true
	}
	return false
}

// Canceled reports whether a statement ended because its context was canceled. lib/pq then
// returns the server's error, which does not match the context's.
func Canceled(err error) bool {
	return errors.Is(err, context.Canceled) || State(err) == "57014"
}

// LockTimedOut reports whether a statement has waited for a lock for the whole lock_timeout.
func LockTimedOut(err error) bool { return State(err) == "55P03" }

// Forbidden reports whether the role lacks a right.
func Forbidden(err error) bool { return State(err) == "42501" }

// NoTable reports whether a table of the statement does not exist.
func NoTable(err error) bool {
	if err == nil {
		return false
	}
	state := State(err)
	return state == "42P01" || state == "" && strings.Contains(err.Error(), "no such table") // SQLite has no code for it
}

// Unacceptable reports whether the database refuses the values of a statement: the same
// statement with them always fails.
func Unacceptable(err error) bool {
	state := State(err)
	return strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23") || sqliteCode(err) == sqliteConstraint
}

// TxAborted reports whether a statement was refused because an earlier one of its
// transaction failed.
func TxAborted(err error) bool { return State(err) == "25P02" }

// OfSeal explains why the last statement of a transaction, which follows a handler that
// reported success, was refused: because of an earlier one.
func OfSeal(err error) error {
	if !TxAborted(err) {
		return err
	}
	return fmt.Errorf("a statement of the handler failed, and the handler ignored its error: %w", err)
}

// ReadOnly reports whether the database accepts no writes now: a standby, a role that may
// only read, a read-only file.
func ReadOnly(err error) bool {
	return State(err) == "25006" || sqliteCode(err) == sqliteReadOnly || errors.As(err, new(*standbyError))
}

// standbyError is the error of a BEGIN that a standby refused.
type standbyError struct{ cause error }

func (e *standbyError) Error() string { return e.cause.Error() }
func (e *standbyError) Unwrap() error { return e.cause }

// Full reports whether SQLite's disk is full. The same statement may succeed later.
func Full(err error) bool { return sqliteCode(err) == sqliteFull }

// OfBegin marks an error of BeginTx, so that [ReadOnly] recognizes a standby. lib/pq begins
// with READ WRITE, which a standby refuses as an unsupported feature. Nothing else in a
// BEGIN can be unsupported.
func OfBegin(err error) error {
	if State(err) == "0A000" {
		return &standbyError{err}
	}
	return err
}

// Connection reports whether err is about the connection, not about the statement: the server
// or the network is gone or shutting down, and the same statement may succeed later.
func Connection(err error) bool {
	if state := State(err); state != "" {
		// 57P01 to 57P03: the server shuts down, crashed, or is starting up.
		// A standby may be promoted. 53300: no connection free.
		return strings.HasPrefix(state, "08") || strings.HasPrefix(state, "57P0") || state == "53300" || state == idleTooLong || state == openTooLong || ReadOnly(err)
	}
	var netErr net.Error
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.As(err, &netErr)
}

// The server ended the transaction and its connection, because the client was idle in it
// for too long, or because it was open for too long.
const (
	idleTooLong = "25P03"
	openTooLong = "25P04"
)

// CommitUnknown reports whether the transaction may or may not have committed, by an error of
// Commit. It returns false only if the server reported a rollback, or the COMMIT was never
// sent.
//
// A context's error means unknown: pgx commits under the context of BeginTx and may return
// its error at any point. pgx's SafeToRetry means unknown too: it is true also for a
// connection that was lost after the COMMIT was sent. Callers check their context before
// they call Commit.
func CommitUnknown(err error) bool {
	switch {
	case err == nil, errors.Is(err, sql.ErrTxDone):
		return false
	case State(err) == idleTooLong:
		return false // the transaction had ended before the COMMIT
	case State(err) != "":
		return Connection(err) || State(err) == "40003" // statement completion unknown
	case strings.Contains(err.Error(), "failed transaction"), strings.Contains(err.Error(), "commit unexpectedly resulted in rollback"):
		return false // lib/pq, pgx: the server answered ROLLBACK
	}
	switch sqliteCode(err) {
	case sqliteError, sqliteBusy, sqliteLocked, sqliteFull, sqliteConstraint:
		return false
	}
	return true
}
