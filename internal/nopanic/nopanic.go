// Package nopanic keeps the panics of users' functions from what is not theirs.
package nopanic

import (
	"errors"
	"runtime/debug"

	"github.com/oncemill/oncemill"
)

// Stack returns the stack of the panic that err reports; empty if it reports none.
func Stack(err error) string {
	if err == nil {
		return "" // without the allocation that errors.As costs
	}
	var panicked *oncemill.PanicError
	if errors.As(err, &panicked) {
		return string(panicked.Stack)
	}
	return ""
}

// Call calls f, and makes an error of its panic, an [*oncemill.PanicError]. That f ends
// its goroutine it leaves as it is.
func Call(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &oncemill.PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// Apart calls f, which may end its goroutine or never return, in a goroutine of its own.
// That costs about a microsecond. The channel gets the error of f, or ErrGoexit.
func Apart(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		err := ErrGoexit // unless f returns
		defer func() { done <- err }()
		err = f()
	}()
	return done
}

// ErrGoexit is the error of a function that ended its goroutine (runtime.Goexit).
var ErrGoexit = errors.New("a function of the configuration ended its goroutine")
