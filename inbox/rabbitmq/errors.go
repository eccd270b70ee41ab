package rabbitmq

import (
	"errors"
)

var (
	// ErrClosed is returned by Subscribe, SubscribeInitialize and Publish after the
	// subscriber has been closed.
	ErrClosed = errors.New("rabbitmq: the subscriber is closed")

	errCallTimeout   = errors.New("no answer from the broker in time")
	errConsumerGone  = errors.New("the broker has canceled the consumer; is the queue deleted?")
	errClosedQuietly = errors.New("channel closed")
	errStuck         = errors.New("deliveries wait for a handler that has run longer than Config.AckTimeout")
	errUnreadable    = errors.New("the delivery cannot be read")
	errNoMessage     = errors.New("the marshaler returned neither a message nor an error")
	errNotConfirmed  = errors.New("the broker has not confirmed a message")
	errNoQueue       = errors.New("no such queue; subscribe to the topic first, or declare it")
	errNoMalformed   = errors.New("set Config.Malformed to keep it elsewhere")
)
