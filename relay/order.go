package relay

import "time"

// Order selects what a relay keeps in order. Messages without a key have no order in
// any mode.
type Order uint8

const (
	// OrderPerKey keeps the messages of a key in order, whatever fails. At most one
	// message of a key is in flight, and the next one follows its confirm. Different
	// keys do not wait for one another.
	OrderPerKey Order = iota

	// OrderPerKeyPipelined sends all messages of a lane in one pipeline, and after any
	// failure resumes from the first unconfirmed one. It is faster if few keys have
	// most messages. The cost: if the broker refuses or loses a message but takes later
	// ones of its key that were in flight with it, the key gets out of order. The
	// message is sent again behind them. While a topic is unavailable, all lanes that
	// have a message of it wait.
	OrderPerKeyPipelined

	// OrderNone keeps no order: no message waits for another one to be confirmed.
	// Failed messages of one key are retried together, when the first of them is.
	OrderNone
)

// Exhausted selects what follows the last attempt of a message that has a key.
type Exhausted uint8

const (
	// ExhaustedSkip makes the message a dead letter, and its successors continue. If it
	// is replayed, it is delivered after them.
	ExhaustedSkip Exhausted = iota

	// ExhaustedHoldKey makes the message a dead letter and keeps its successors
	// waiting, in order, until an operator replays or discards it. It has no effect
	// with OrderNone.
	ExhaustedHoldKey
)

// Retry configures how often and when a refused message is retried. Only failures of
// the message itself count. An unavailable broker never uses up an attempt.
type Retry struct {
	// MaxAttempts is the number of attempts before a message becomes a dead letter.
	// Default: 10. 1: no retry.
	MaxAttempts int

	// Initial and Max bound the wait between two attempts. It is drawn from zero to
	// twice an interval that starts at Initial and doubles up to Max (full jitter).
	// Defaults: 1 s and 5 min.
	Initial, Max time.Duration

	// TimeLimit, if set, makes a message a dead letter at the first failed attempt that
	// ends later than this after its first failure, even if attempts are left. For how long
	// the message was due before that attempt does not count: its topic was paused or
	// unavailable, or no relay ran. So it gets one more attempt after that. Default: none.
	TimeLimit time.Duration

	// Exhausted selects what follows the last attempt. Default: ExhaustedSkip.
	Exhausted Exhausted
}
