package oncemill

import (
	"errors"
	"fmt"
)

var (
	// ErrTxOwned is returned by Commit and Rollback of a transaction handle
	// that only lends the transaction out. Return nil or an error from your
	// function instead: whoever began the transaction ends it.
	ErrTxOwned = errors.New("oncemill: the transaction belongs to whoever began it; return instead of ending it")

	// ErrNoLastInsertID is returned by LastInsertId of a result that came from
	// PostgreSQL, which has no such thing. Use RETURNING.
	ErrNoLastInsertID = errors.New("oncemill: PostgreSQL reports no last insert id; use returning")

	// ErrUnknownDialect means that the database cannot be told from its driver
	// (a wrapped driver, for example). Set Config.Dialect.
	ErrUnknownDialect = errors.New("oncemill: dialect cannot be told from the driver; set Config.Dialect")
)

// ConfigError names a configuration value that cannot be used. Nothing has been
// sent to the database when it is returned. Several of them come joined; find
// them with errors.As.
type ConfigError struct {
	Field   string // as the caller wrote it, for example "outbox.Config.MaxPayload"
	Value   string // the offending value, shortened and quoted where it is text
	Problem string // what is wrong and what would be right
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("%s = %s: %s", e.Field, e.Value, e.Problem)
}

// SchemaError means that the tables in the database do not fit this version of
// the library.
type SchemaError struct {
	Set     string // name of the migration set, for example "outbox"
	Have    int    // version found in the database, 0 if none
	Want    int    // version this library was built with
	Problem string
}

func (e *SchemaError) Error() string {
	return fmt.Sprintf("oncemill: migrations %q: database has version %d, library has %d: %s", e.Set, e.Have, e.Want, e.Problem)
}

// PanicError is what a panic of a function of yours becomes where it must not end the
// process: of a handler once its attempt has been rolled back, of a command, of a
// marshaler, of a function in a Config.
type PanicError struct {
	Value any    // what it panicked with
	Stack []byte // of its goroutine, from where it panicked
}

func (e *PanicError) Error() string { return fmt.Sprintf("panicked: %v\n%s", e.Value, e.Stack) }

// Unwrap returns the value of the panic if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
