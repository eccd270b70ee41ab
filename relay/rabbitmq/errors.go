package rabbitmq

import (
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/relay"
)

var (
	// ErrRunning is returned by a second Run while the first one runs. Run the sink once;
	// the relay already does.
	ErrRunning = errors.New("rabbitmq: the sink is already running")

	// ErrNotRunning is the unavailable outcome of messages passed to a sink whose Run has
	// not begun or has ended.
	ErrNotRunning = errors.New("rabbitmq: the sink is not running")

	// ErrNoConnection is the unavailable outcome of messages for which there was no connection, or
	// no channel, when their time ended; and of those that wait for a connection that takes longer
	// than a thirtieth of Config.ConfirmTimeout.
	ErrNoConnection = errors.New("rabbitmq: not connected in time")

	// ErrBlocked is the unavailable outcome of messages whose time ended while the broker
	// blocked the connection. A broker does so when it is short of memory or disk; free some
	// there.
	ErrBlocked = errors.New("rabbitmq: the broker has blocked publishing")

	// ErrUnanswered is the unavailable outcome of messages that the broker did not confirm
	// in time. They may have arrived.
	ErrUnanswered = errors.New("rabbitmq: no confirm in time")

	// ErrNacked is the unavailable outcome of messages that the broker nacked: a queue is
	// full and rejects publishing, or failed to store. Others of the lane are interrupted with it
	// when their channel is replaced, because it only nacks.
	ErrNacked = errors.New("rabbitmq: nacked by the broker")

	// ErrStalled is the unavailable outcome of messages on a channel that was replaced
	// because a confirm did not arrive. Either that channel alone did not answer, which
	// makes the error a relay.ErrInterrupted too, or the whole connection did not for
	// Config.ConfirmTimeout. The messages may have arrived. A confirm that arrives later, on
	// the old channel, still counts.
	ErrStalled = errors.New("rabbitmq: channel replaced, a confirm is overdue")

	// ErrStrayReturn is the unavailable outcome of all messages in flight on a channel that
	// returned a message which was not in flight on it: the channel's confirms cannot be
	// trusted. It is a defect in a proxy in between, or in this package; please report it.
	ErrStrayReturn = errors.New("rabbitmq: a return matches no message in flight")
)

// Outcomes that are the same for every message.
var (
	unavailableNotRunning   = relay.Unavailable(ErrNotRunning)
	unavailableNoConnection = relay.Unavailable(ErrNoConnection)
	unavailableBlocked      = relay.Unavailable(ErrBlocked)
	unavailableUnanswered   = relay.Unavailable(ErrUnanswered)
	unavailableNacked       = relay.Unavailable(ErrNacked)
	unavailableStalled      = relay.Unavailable(ErrStalled)
	interruptedStalled      = relay.Interrupted(ErrStalled)
	interruptedNacked       = relay.Interrupted(ErrNacked)
	unavailableStrayReturn  = relay.Unavailable(ErrStrayReturn)
)

// ReturnedError is the refused outcome of a message that the broker returned, because no
// queue is bound for it. Declare the queue and its binding.
type ReturnedError struct {
	Exchange   string
	RoutingKey string
	Code       int    // 312, NO_ROUTE
	Reason     string // the broker's text
}

func (e *ReturnedError) Error() string {
	return fmt.Sprintf("no queue is bound to exchange %q for routing key %q: start its consumer, or bind a queue (%d %s)", e.Exchange, e.RoutingKey, e.Code, e.Reason)
}

// RejectedError is the refused outcome of a message because of which the broker closed the
// channel: it is larger than the broker's max_message_size, or a property set by the
// marshaler is invalid.
type RejectedError struct {
	Code   int    // 406 PRECONDITION_FAILED or 311 CONTENT_TOO_LARGE
	Reason string // the broker's text
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("rejected by the broker: %s (%d)", e.Reason, e.Code)
}

// PropertyError is the refused outcome of a message with a property or header that AMQP
// cannot carry. No part of it has been sent.
type PropertyError struct {
	Property string // for example "message-id" or "headers"
	Problem  string
}

func (e *PropertyError) Error() string {
	return fmt.Sprintf("AMQP property %s: %s", e.Property, e.Problem)
}
