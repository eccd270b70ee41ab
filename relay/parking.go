package relay

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// fence is a lease as its holder knows it. A fenced write takes effect only while the
// row of the lease still matches.
type fence struct {
	lane  int
	owner string
	epoch int64
}

// errFenced is the result of a fenced write of a former owner: nothing was written.
var errFenced = errors.New("the lane belongs to another worker")

// verdict is what happens to a message that failed.
type verdict uint8

const (
	retryLater verdict = iota // to parked, due again after a while
	letterSkip                // to the dead letters; the successors of its key continue
	letterHold                // to the dead letters, and kept in parked: its successors wait
)

// failure is a failed attempt for which the message, not the topic or the sink, is
// blamed.
type failure struct {
	outboxstore.Ref
	parked  bool    // where the row is: in parked, else in the outbox
	attempt int     // number of the attempt, from 1: writing one twice is harmless
	free    bool    // not charged: attempt is the number charged before
	class   string  // of the reason; see failure.go
	text    string  // the error's
	verdict verdict // and what follows

	unanswered bool          // an earlier attempt had no answer: it may have been delivered
	retryIn    time.Duration // for retryLater
}

// parkedRow is a row of parked.
type parkedRow struct {
	outboxstore.Row
	attempts   int           // failed so far
	tried      bool          // it has failed, if at no charge
	crashed    bool          // one of them ended with the death of its worker
	unanswered bool          // one of them had no answer
	age        time.Duration // since its first failure, or else since it was parked, by the database's clock
}

// parkedKey is a key of a lane that has rows in parked. Unkeyed rows are parked
// individually and have none.
type parkedKey struct {
	lane int
	key  string
}

// command is an operator's command on a dead letter. Only the owner of its lane carries
// it out.
type command struct {
	letter int64 // id of the dead letter
	lane   int
	key    string // empty: unkeyed
}

// dueRequest selects parked rows to look for.
type dueRequest struct {
	lanes  []int
	known  []outboxstore.Known // rows to pass over
	topics []string            // to pass over, with all that follows in their keys
	after  string              // the topic after which to begin
	most   int                 // topics of each lane to look at, at most
	heads  int                 // at most
	rows   int                 // at most, of each key
	bytes  int                 // of all; the last row may be too large
	inline bool                // pass over keys whose first row does not come with its payload
}

// mostInline is the largest payload that is returned with its row: it excludes no other
// one, and no answer is too large for its time.
func (r dueRequest) mostInline() int { return r.bytes / 4 }

// mostHead is the largest payload of a head.
func (r dueRequest) mostHead() int {
	if r.inline {
		return r.mostInline()
	}
	return math.MaxInt32
}

// looked is the result of a look for due rows.
type looked struct {
	rows []parkedRow
	next time.Duration // until the next one is due, of the topics looked at; negative: none is
	more string        // the topic after which to go on; empty: all were looked at
}

// parkingStore keeps messages that could not be published: rows that wait for their
// next attempt with their successors behind them (parked), and dead letters. At any
// time a row is in exactly one of outbox, parked and dead letters (a held one in
// parked, with a dead letter that points to it). Every write moves what its delete
// returned, in one fenced statement. All writes may be repeated: a failure is recorded
// once per attempt.
//
// In parked, the first row of a key has the time of its next attempt, unless it is
// held; its successors have none. An unkeyed row always has its own.
type parkingStore interface {
	// parkedKeys returns all keys of lanes that have rows in parked.
	parkedKeys(ctx context.Context, lanes []int) ([]parkedKey, error)

	// look returns rows whose next attempt is due. Topics take turns, and each row
	// comes with the rows of its key that follow, in order. A payload may be missing;
	// see outboxstore.Row.Missing.
	look(ctx context.Context, r dueRequest) (looked, error)

	// piece returns up to most bytes of the payload of a parked row, starting at
	// offset; none if the row is gone.
	piece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error)

	// fail records failures of one lane. It moves followers, rows of the outbox whose
	// keys are in parked (or are put there by these failures), behind them. A parked
	// row that fails at no charge only waits longer. A letterSkip of a parked row makes
	// its successor due now. If the suspect of the lane is among the failures, it is
	// cleared. Rows that are gone are passed over.
	fail(ctx context.Context, f fence, failures []failure, followers []outboxstore.Ref) error

	// follow moves rows of the outbox whose keys are in parked there: the first rows of
	// these keys up to a limit, except those known. It returns how many.
	follow(ctx context.Context, f fence, keys []string, known []outboxstore.Known, limit int) (moved int, err error)

	// settle deletes parked rows that the broker has confirmed, into the history if one
	// is kept. Like outboxqueue.Queue.Remove, it matches rows by identity and needs no
	// fence. Rows that are now first of their key are due now. It returns the keys of
	// these rows that have none left in parked.
	settle(ctx context.Context, rows []outboxstore.Ref) (unparked []parkedKey, missed int, err error)

	// commands returns operators' commands on lanes, oldest first, at most limit.
	commands(ctx context.Context, lanes []int, limit int) ([]command, error)

	// carryOut carries out the commands on dead letters of one lane. A replay puts the
	// message back to parked, in its position, with its attempts at zero, due now if it
	// is first of its key. A discard of a held message removes it from parked and makes
	// its successor due now. Dead letters without a command are passed over. Of the
	// dead letters' keys, it returns those that are in parked afterwards and those that
	// no longer are.
	carryOut(ctx context.Context, f fence, letters []int64) (parked, unparked []parkedKey, err error)

	// suspect records the one message that is about to be in flight alone, or with id 0
	// that there is none.
	suspect(ctx context.Context, f fence, id int64) error

	// find returns a row by lane and id, from outbox or parked, without payload and
	// metadata; attempts is 0 for a row of the outbox.
	find(ctx context.Context, lane int, id int64) (row parkedRow, parked, found bool, err error)

	// beyond returns, for each of lanes, the id of a message among its newest rows of
	// the outbox whose topic is not in topics, if there is one.
	beyond(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error)

	// calm resets the crash count of lanes whose epochs still match.
	calm(ctx context.Context, owner string, epochs map[int]int64) error
}
