package mill

import "errors"

var (
	// ErrRunning is returned by a second call of Run.
	ErrRunning = errors.New("mill: Run was called before; create a new Mill")

	// ErrNotRunning is returned by Ready outside of Run.
	ErrNotRunning = errors.New("mill: not running")

	// ErrNotSubscribed is returned by Ready while a consumer receives no messages.
	ErrNotSubscribed = errors.New("not subscribed")

	// ErrStillRunning is returned by Run when parts did not return in time after their
	// context had ended. They keep running. End the process.
	ErrStillRunning = errors.New("mill: stopped, but some parts have not returned; end the process")

	errSilent         = errors.New("mill: the database does not answer")
	errStoppedItself  = errors.New("returned before it was stopped")
	errEndedGoroutine = errors.New("ended its goroutine")
	errNoProduces     = errors.New("set Consumer.Produces to their topic")
	errNotFromHandler = errors.New("mill: a middleware returned messages; return them from Consumer.Handler instead")
)
