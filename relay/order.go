package relay

import "time"

// Order says what a relay keeps in order. Messages without a key have no order in
// any mode.
type Order uint8

const (
	// OrderPerKey keeps the messages of a key in order, whatever fails: at most
	// one of a key is in flight, and the next one follows its confirm. Different
	// keys do not wait for one another.
	OrderPerKey Order = iota

	// OrderPerKeyPipelined sends all messages of a lane in one pipeline, and
	// after any failure goes on from the first unconfirmed one. It is faster
	// where few keys have most messages. What it costs: when the broker refuses
	// or loses a message but takes later ones of its key that were in flight with
	// it, the key is out of order: it comes again behind them. While a topic is
	// unavailable, all lanes that have a message of it wait.
	OrderPerKeyPipelined

	// OrderNone keeps no order: no message waits for another one to be confirmed.
	// Those of one key that have failed are tried again together, when the first of
	// them is.
	OrderNone
)

// Exhausted says what follows the last attempt of a message that has a key.
type Exhausted uint8

const (
	// ExhaustedSkip makes the message a dead letter, and its successors flow. If it is
	// replayed, it comes after them.
	ExhaustedSkip Exhausted = iota

	// ExhaustedHoldKey makes the message a dead letter and keeps its successors waiting,
	// in order, until an operator replays or discards it. It has no effect in
	// OrderNone.
	ExhaustedHoldKey
)

// Unroutable says what becomes of a message that the broker has no receiver for.
type Unroutable uint8

const (
	// UnroutableRefuse counts it as a failed attempt, unless the topic as a whole seems
	// to have lost its queues: then its messages wait.
	UnroutableRefuse Unroutable = iota

	// UnroutableDrop takes it for delivered: right for a topic that may have no
	// subscriber.
	UnroutableDrop
)

// Retry says how often and when a message is tried again that was refused. Only
// failures of the message itself count; that the broker is not available never
// does.
type Retry struct {
	// MaxAttempts is how many attempts a message has before it becomes a dead
	// letter. Default: 10. 1: no second one.
	MaxAttempts int

	// Initial and Max bound the wait between two attempts: it is drawn from zero
	// to twice an interval that begins with Initial and doubles up to Max (full
	// jitter). Defaults: 1 s and 5 min.
	Initial, Max time.Duration

	// TimeLimit, if set, makes a message a dead letter at the first failed
	// attempt that ends later than this after its first failure, even if it has
	// attempts left. Default: none.
	TimeLimit time.Duration

	// Exhausted says what follows the last attempt. Default: ExhaustedSkip.
	Exhausted Exhausted
}
