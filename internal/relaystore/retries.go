package relaystore

import (
	"context"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// Fate is what happens to a message that failed.
type Fate uint8

// The values of Fate.
const (
	FateRetry      Fate = iota // retrying: due again after a while
	FateDeadLetter             // to the dead letters; the successors of its key continue
	FateHoldKey                // to the dead letters, and kept in parked: its successors wait
)

// Failure is a failed attempt for which the message, not the topic or the sink, is
// blamed.
type Failure struct {
	outboxstore.Ref
	Retrying  bool   // the row is in parked, else in the outbox
	Attempt   int    // attempt number, from 1: recording one twice is harmless
	Uncharged bool   // no attempt is used up: Attempt is the number used up before
	Class     string // of the reason
	Text      string // of the error
	Stack     string // of a panic, for the log; not stored
	Topic     string // for the log; not stored
	Key       string // for the log; not stored
	Fate      Fate

	Fingerprint string        // of the dead letter
	Unanswered  bool          // an earlier attempt had no answer: it may have been delivered
	RetryIn     time.Duration // for FateRetry
}

// Row is a retrying message, or one that waits behind it.
type Row struct {
	outboxstore.Row
	Attempts   int           // used up
	Tried      bool          // it has failed, maybe without using up an attempt
	Crashed    bool          // an attempt ended with the death of its worker
	Unanswered bool          // an attempt had no answer
	Age        time.Duration // since its first failure, or else since it was moved to parked, by the database's clock
	Late       time.Duration // since its attempt was due; 0 for a row that is not the first of its key
}

// Key is a key of a lane that has rows in parked. A row without a key has none.
type Key struct {
	Lane int
	Key  string
}

// Command is an operator's command on a dead letter. Only the owner of its lane carries
// it out.
type Command struct {
	DeadLetter int64 // id of the dead letter
	Lane       int
	Key        string // empty: unkeyed
}

// Removal is the result of Remove.
type Removal struct {
	Rows  int   // how many existed
	Ended []Key // their keys that have no rows left in parked
}

// Retries are the messages that could not be published, and the commands on their dead
// letters.
type Retries interface {
	// Keys returns all keys of lanes that have rows in parked.
	Keys(ctx context.Context, lanes []int) ([]Key, error)

	// Due returns rows whose next attempt is due. Topics take turns, and each row comes
	// with the rows of its key that follow, in order. A payload may be missing; see
	// outboxstore.Row.Missing.
	Due(ctx context.Context, r DueRequest) (Due, error)

	// ReadPiece returns up to most bytes of the payload of a row, starting at offset. It
	// returns none if the row is gone.
	ReadPiece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error)

	// Fail records failures of one lane. It moves followers, rows of the outbox whose
	// keys are in parked (or are put there by these failures), behind them. An uncharged
	// failure of a row in parked only delays it. FateDeadLetter of such a row makes its
	// successor due now. If the message alone in flight is among the failures, it is cleared.
	// Rows that are gone are passed over.
	Fail(ctx context.Context, f Fence, failures []Failure, followers []outboxstore.Ref) error

	// Follow moves rows of the outbox whose keys are in parked there: the first rows of
	// these keys up to a limit, except those known. It returns how many.
	Follow(ctx context.Context, f Fence, keys []string, known []outboxstore.Known, limit int) (moved int, err error)

	// Remove deletes rows that the broker has confirmed or, with move, moves them into the
	// history. Rows are matched by lane, id, message id and creation time; no fence is
	// needed. Rows that are now the first of their key are due now. With an error, the
	// result is that of the part that has taken effect.
	Remove(ctx context.Context, rows []outboxstore.Ref, move bool) (Removal, error)

	// Commands returns operators' commands on lanes, oldest message first, at most limit.
	Commands(ctx context.Context, lanes []int, limit int) ([]Command, error)

	// CarryOut carries out the commands on dead letters of one lane. A replay puts the
	// message back into parked, in its position, with no attempts used up, due now if it
	// is the first of its key. A discard of a held message removes it from parked and
	// makes its successor due now. Dead letters without a command are passed over. Of the
	// dead letters' keys, it returns those that are in parked afterwards and those that no
	// longer are.
	CarryOut(ctx context.Context, f Fence, deadLetters []int64) (retrying, ended []Key, err error)

	// Find returns a row by lane and id, from outbox or parked, without payload and
	// metadata. Attempts is 0 for a row of the outbox.
	Find(ctx context.Context, lane int, id int64) (row Row, retrying, found bool, err error)

	// FindOtherTopics returns, for each of lanes, the id of a message among its newest
	// rows of the outbox whose topic is not in topics, if there is one.
	FindOtherTopics(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error)
}
