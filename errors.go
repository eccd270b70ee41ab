package oncemill

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/turn"
)

var (
	// ErrTxOwned is returned by Commit and Rollback of a handler's transaction.
	// Do not end the transaction; return nil or an error from your function instead.
	// The code that began the transaction ends it.
	ErrTxOwned = errors.New("oncemill: do not commit or roll back a borrowed transaction; return instead")

	// ErrNoLastInsertID is returned by LastInsertId of a result from PostgreSQL, which
	// does not support it. Use RETURNING.
	ErrNoLastInsertID = errors.New("oncemill: PostgreSQL has no last insert id; use RETURNING")

	// ErrNothingToUndo is returned by MigrateDown for a set that is not applied.
	ErrNothingToUndo = errors.New("oncemill: no migration to undo: the set is not applied")

	// ErrUnknownDialect means that the dialect cannot be detected from the driver (a
	// wrapped driver, for example). Set Config.Dialect.
	ErrUnknownDialect = errors.New("oncemill: cannot detect the dialect from the driver; set Config.Dialect")
)

// Errors of transactions on SQLite. Every oncemill function that writes can return
// them.
var (
	// ErrNestedTx means that a transaction would begin inside another one on the same
	// database. SQLite has one writer, so it would wait forever. Use the transaction
	// that is in the context ([TxFromContext]), or use a context without it after that
	// transaction has ended.
	ErrNestedTx = turn.ErrNested

	// ErrDatabaseLocked means that a single transaction has kept the database from
	// being written for ten seconds. The transaction may belong to this process or to
	// another one. Nothing was written; calling again is safe. A
	// handler that takes that long does not belong in a transaction on SQLite.
	ErrDatabaseLocked = turn.ErrLocked

	// ErrDatabaseReplaced means that the database's file was removed or replaced while
	// it was open. Nothing was written. A relay stops with this error. Stop every
	// process before you restore a backup, and start them afterwards.
	ErrDatabaseReplaced = turn.ErrReplaced
)

// ConfigError names a configuration value that cannot be used. Nothing has been written
// when it is returned. Nothing has been sent to the database either, unless the error
// is about the database itself (see [CheckSQLite]). Several of them are joined; find
// them with errors.As.
type ConfigError struct {
	Field   string // as the caller wrote it, for example "outbox.Config.MaxPayload"
	Value   string // the offending value, shortened and quoted where it is text
	Problem string // what is wrong and what would be right
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("%s = %s: %s", e.Field, e.Value, e.Problem)
}

// SchemaError means that the tables in the database do not match this version of the
// library.
type SchemaError struct {
	Set     string // name of the migration set, for example "outbox"
	Have    int    // version found in the database, 0 if none
	Want    int    // version this library was built with
	Problem string
}

func (e *SchemaError) Error() string {
	return fmt.Sprintf("oncemill: migrations %q: database has version %d, library has %d: %s", e.Set, e.Have, e.Want, e.Problem)
}

// MigrationLockError means that a migration gave up waiting for a lock. Nothing of the
// set was changed; calling again is safe.
//
// If PID is not 0, that session holds the lock that serializes migrations. If it is a
// migration, let it finish. Any login can take that lock: if the session is not a
// migration, end it with pg_terminate_backend. If PID is 0, that session has ended
// since, or a transaction uses a table that a step changes.
type MigrationLockError struct {
	PID         int    // backend that holds the lock of migrations, or 0
	User        string // its role
	Application string // its application_name
	Waited      time.Duration
	Err         error // of the driver, 55P03
}

func (e *MigrationLockError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("oncemill: waited %v for a lock; end long transactions on oncemill's tables and try again: %v", e.Waited, e.Err)
	}
	return fmt.Sprintf("oncemill: another session has held the lock of migrations for %v: pid %d, role %q, application %q; wait for it, or end it if it is not a migration: %v",
		e.Waited, e.PID, e.User, e.Application, e.Err)
}

func (e *MigrationLockError) Unwrap() error { return e.Err }

// DataLossError means that a down step was refused because it drops tables that have
// rows. Nothing was changed. Remove the rows first, or set DownOptions.LoseRows.
type DataLossError struct {
	Set     string
	Version int      // of the step that would be undone
	Tables  []string // quoted names
}

func (e *DataLossError) Error() string {
	return fmt.Sprintf("oncemill: migrations %q: version %d cannot be undone without losing the rows of %s", e.Set, e.Version, strings.Join(e.Tables, ", "))
}

// PanicError reports a panic of one of your functions that must not end the process: of
// a handler (after its attempt was rolled back), a command, a marshaler, or a function
// in a Config.
type PanicError struct {
	Value any    // what it panicked with
	Stack []byte // of its goroutine, from where it panicked
}

// Error returns one line, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("panicked: %v", e.Value) }

// Unwrap returns the value of the panic if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
