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

// Apart is [Call] in a goroutine of its own: that f ends its goroutine is an error, too. It
// returns when f has, and costs about a microsecond.
func Apart(f func() error) error {
	ended := make(chan error, 1)
	go func() {
		err := errEnded
		defer func() { ended <- err }()
		err = Call(f)
	}()
	return <-ended
}

var errEnded = errors.New("the function ended its goroutine")
