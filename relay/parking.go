package relay

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// fence is a lease as its holder knows it. A fenced write happens only while the
// row of the lease still says so.
type fence struct {
	lane  int
	owner string
	epoch int64
}

// errFenced is the answer to a fenced write of a former owner: nothing happened.
var errFenced = errors.New("the lane belongs to another worker")

// verdict says what becomes of a message that failed.
type verdict uint8

const (
	retryLater verdict = iota // to parked, due again after a while
	letterSkip                // to the dead letters; the successors of its key flow
	letterHold                // to the dead letters, and kept in parked: its successors wait
)

// failure is an attempt that the message, and not the way out, has failed.
type failure struct {
	outbox.Ref
	parked  bool    // where the row is: in parked, else in the outbox
	attempt int     // number of the attempt, from 1: writing one twice is harmless
	free    bool    // at no charge: attempt is the number of those charged before
	class   string  // of the reason; see failure.go
	text    string  // the error's
	verdict verdict // and what follows

	unanswered bool          // an earlier attempt had no answer: it may have been delivered
	retryIn    time.Duration // for retryLater
}

// parkedRow is a row of parked.
type parkedRow struct {
	outbox.Row
	attempts   int           // failed so far
	tried      bool          // it has failed, if at no charge
	crashed    bool          // one of them ended with the death of its worker
	unanswered bool          // one of them had no answer
	age        time.Duration // since its first failure, or else since it was parked, by the database's clock
}

// parkedKey is a key of a lane that has rows in parked. Unkeyed rows are parked
// each on its own and have none.
type parkedKey struct {
	lane int
	key  string
}

// command is what an operator wants done with a dead letter. Only the owner of
// its lane does it.
type command struct {
	letter int64 // id of the letter
	lane   int
	key    string // empty: unkeyed
}

// dueRequest is what to look for among parked rows.
type dueRequest struct {
	lanes  []int
	known  []outbox.Known // rows to pass over
	topics []string       // to pass over, with all that follows in their keys
	after  string         // the topic after which to begin
	most   int            // topics of each lane to look at, at most
	heads  int            // at most
	rows   int            // at most, of each key
	bytes  int            // of all; the last row may be too large
	inline bool           // pass over keys whose first row does not come with its payload
}

// mostInline is how long a payload may be to come with its row: no other one is kept
// out by it, and no answer is too large for its time.
func (r dueRequest) mostInline() int { return r.bytes / 4 }

// mostHead is how long the payload of a head may be.
func (r dueRequest) mostHead() int {
	if r.inline {
		return r.mostInline()
	}
	return math.MaxInt32
}

// looked is what a look for due rows has found.
type looked struct {
	rows []parkedRow
	next time.Duration // until the next one is due, of the topics looked at; negative: none is
	more string        // the topic after which to go on; empty: all were looked at
}

// parkingStore keeps what could not be published: rows that wait for their next
// attempt with their successors behind them (parked), and dead letters. A row is in
// one of outbox, parked and dead letters at any time (a held one in parked, with
// a letter that points to it), and every write moves what its delete returned, in
// one fenced statement. All writes may be repeated: a failure is written for its
// attempt once.
//
// In parked, the first row of a key has the time of its next attempt, unless it
// is held; its successors have none. An unkeyed row always has its own.
type parkingStore interface {
	// parkedKeys returns all keys of lanes that have rows in parked.
	parkedKeys(ctx context.Context, lanes []int) ([]parkedKey, error)

	// look returns rows whose next attempt is due, of each topic in turn, each with
	// the rows of its key that follow, in order. A payload may be missing; see
	// outbox.Row.Missing.
	look(ctx context.Context, r dueRequest) (looked, error)

	// piece returns up to most bytes of the payload of a parked row, from an offset on;
	// none if it is not there.
	piece(ctx context.Context, of outbox.Ref, offset, most int) ([]byte, error)

	// fail writes failures of one lane down, and moves followers, rows of the
	// outbox whose keys are in parked (or are put there by these failures),
	// behind them. A parked row that fails at no charge only waits longer. A
	// letterSkip of a parked row makes its successor due now.
	// If the suspect of the lane is among the failures, it is none any more.
	// Rows that are gone are passed over.
	fail(ctx context.Context, f fence, failures []failure, followers []outbox.Ref) error

	// follow moves rows of the outbox whose keys are in parked there, the first of
	// these keys up to a limit but for those known, and returns how many.
	follow(ctx context.Context, f fence, keys []string, known []outbox.Known, limit int) (moved int, err error)

	// settle deletes parked rows that the broker has confirmed, into the
	// history if one is kept; matched like outbox.Queue.Remove, and like it
	// needs no fence. What is first of its key now is due now. It returns the
	// keys of these rows that have none left in parked.
	settle(ctx context.Context, rows []outbox.Ref) (unparked []parkedKey, missed int, err error)

	// commands returns what operators want done in lanes, oldest first, at
	// most limit.
	commands(ctx context.Context, lanes []int, limit int) ([]command, error)

	// carryOut does what letters of one lane say: a replay puts the message
	// back to parked, in its place, with its attempts at zero, due now if it
	// is first of its key; a discard of a held message removes it from parked
	// and makes its successor due now. Letters whose command is gone are
	// passed over. It returns the keys that are in parked afterwards and those
	// that are not any more, of the letters' keys.
	carryOut(ctx context.Context, f fence, letters []int64) (parked, unparked []parkedKey, err error)

	// suspect writes down the one message that is about to be in flight alone,
	// or with id 0 that none is.
	suspect(ctx context.Context, f fence, id int64) error

	// find returns a row by lane and id, wherever it is, without payload and metadata;
	// attempts is 0 for one of the outbox.
	find(ctx context.Context, lane int, id int64) (row parkedRow, parked, found bool, err error)

	// beyond returns, for those of lanes that have one among their newest rows
	// of the outbox, the id of a message of another topic than these.
	beyond(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error)

	// calm sets the count of crashes of lanes to zero, for those whose epochs
	// are still these.
	calm(ctx context.Context, owner string, epochs map[int]int64) error
}
