package mill

import "errors"

var (
	// ErrRunning is returned by a second call of Run.
	ErrRunning = errors.New("mill: Run was called before; make a new Mill")

	// ErrNotRunning is returned by Ready outside of Run.
	ErrNotRunning = errors.New("mill: not running")

	// ErrNotSubscribed is returned by Ready while a consumer receives no messages.
	ErrNotSubscribed = errors.New("not subscribed")

	// ErrStillRunning is returned by Run when parts have not returned in time after their
	// context had ended. They are left behind.
	ErrStillRunning = errors.New("mill: stopped, but something has not returned")

	errStoppedItself  = errors.New("has stopped by itself")
	errEndedGoroutine = errors.New("has ended its goroutine")
	errNoProduces     = errors.New("set Consumer.Produces to their topic")
	errNotFromHandler = errors.New("mill: a middleware returned messages; return them from Consumer.Handler instead")
)
