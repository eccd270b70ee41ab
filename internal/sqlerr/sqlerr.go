// Package sqlerr tells what a database error means, whichever driver made it.
package sqlerr

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
)

// SQLite's primary result codes that say something about concurrency or about
// the outcome of a commit.
const (
	sqliteError      = 1 // of a commit: there is no transaction, SQLite has rolled it back
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

// Retryable reports that the transaction lost against another one and that
// running it again is right: a serialization failure, a deadlock, a busy SQLite
// database.
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

// Contended reports that a statement failed because of another transaction: as
// [Retryable], or because that held a lock for too long.
func Contended(err error) bool { return Retryable(err) || State(err) == "55P03" }

// TimedOut reports that a statement has waited too long for a lock, or taken too long.
func TimedOut(err error) bool {
	switch State(err) {
	case "55P03", "57014":
		return true
	}
	return false
}

// LockTimedOut reports that a statement has waited for a lock for the whole lock_timeout.
func LockTimedOut(err error) bool { return State(err) == "55P03" }

// TxAborted reports that a statement was refused because an earlier one of its
// transaction failed.
func TxAborted(err error) bool { return State(err) == "25P02" }

// ReadOnly reports that the database takes no writes now: a standby, a role that
// may only read, a read-only file.
func ReadOnly(err error) bool {
	return State(err) == "25006" || sqliteCode(err) == sqliteReadOnly || errors.As(err, new(*standbyError))
}

// standbyError is a BEGIN that a standby refused.
type standbyError struct{ cause error }

func (e *standbyError) Error() string { return e.cause.Error() }
func (e *standbyError) Unwrap() error { return e.cause }

// Full reports that SQLite has no room to write: the same statement may succeed later.
func Full(err error) bool { return sqliteCode(err) == sqliteFull }

// OfBegin marks an error of BeginTx, so that [ReadOnly] recognises a standby.
// lib/pq begins with READ WRITE, which a standby refuses as a feature that it does not
// support. There is nothing else in a BEGIN that a server does not support.
func OfBegin(err error) error {
	if State(err) == "0A000" {
		return &standbyError{err}
	}
	return err
}

// Connection reports that err says nothing about the statement: the server, or
// the way to it, is gone or going, and the same statement may succeed later.
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

// The server has ended a transaction, with its connection, whose client had said nothing
// for too long, or that was open for too long, at any moment.
const (
	idleTooLong = "25P03"
	openTooLong = "25P04"
)

// CommitUnknown reports that an error of Commit leaves open whether the
// transaction committed. It answers no only where the server has said so, or
// where the commit was never sent.
//
// A context's error leaves it open: pgx commits under the context of BeginTx and
// returns it from any point of the way. A caller looks at its context before it
// calls Commit. So does pgx's SafeToRetry: of a connection lost after the commit
// was sent it says that nothing was.
func CommitUnknown(err error) bool {
	switch {
	case err == nil, errors.Is(err, sql.ErrTxDone):
		return false
	case State(err) == idleTooLong:
		return false // it had ended before the commit came
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
