package inbox

import (
	"strings"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// ErrorText is the default of Config.ErrorText. It returns the text of err, but for a
// PostgreSQL error only its SQLSTATE, since its text quotes the values of statements. It
// finds database errors through any wrapping that keeps their text.
func ErrorText(err error) string {
	text := err.Error()
	for _, quoted := range databaseErrors(err) {
		text = strings.ReplaceAll(text, quoted.Error(), "database error, SQLSTATE "+sqlerr.State(quoted))
	}
	return text
}

// databaseErrors returns the errors that have a SQLSTATE of their own.
func databaseErrors(err error) (found []error) {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ SQLState() string }); ok {
		return []error{err}
	}
	switch e := err.(type) { //nolint:errorlint // walks the tree itself
	case interface{ Unwrap() error }:
		return databaseErrors(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			found = append(found, databaseErrors(one)...)
		}
	}
	return found
}

// textOf returns the text of err for logs, failure records and dead letters.
func (in *Inbox) textOf(err error) (text string) {
	if err == nil {
		return ""
	}
	if panicked := nopanic.Call(func() error { text = in.cfg.ErrorText(err); return nil }); panicked != nil {
		return "inbox.Config.ErrorText panicked"
	}
	return text
}

// told returns err in a form that is safe for a router to log.
func (in *Inbox) told(err error) error {
	if err == nil {
		return nil
	}
	if text := in.textOf(err); text != err.Error() {
		return &toldError{text, err}
	}
	return err
}

// toldError is an error whose text reveals nothing of payloads.
type toldError struct {
	text string
	err  error
}

func (e *toldError) Error() string { return e.text }
func (e *toldError) Unwrap() error { return e.err }
