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

	errStoppedItself = errors.New("has stopped by itself")
	errNoProduces    = errors.New("set Consumer.Produces to their topic")
	errNobody        = errors.New("mill: a message was to be published outside of the transaction; does a middleware return messages?")
)
