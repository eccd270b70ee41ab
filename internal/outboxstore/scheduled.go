package outboxstore

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"time"
)

// ScheduledRow is a message for a later time.
type ScheduledRow struct {
	Row
	Micros   int64 // since 1970, or from now on if Relative
	Relative bool
}

// Position is a position in the order in which scheduled messages are due.
type Position struct {
	At  string // as the database writes it
	Seq int64
}

// All messages are behind Beginning and up to End.
var (
	Beginning = Position{At: "-infinity"}
	End       = Position{At: "infinity"}
)

// Scheduled identifies a scheduled message.
type Scheduled struct {
	Position
	Key string
}

// Due is the first scheduled message.
type Due struct {
	In    time.Duration // until it is due; longer times may be shortened to a day
	Bytes int64         // of payload and metadata; 0 if size does not matter
}

// dueIn converts microseconds. Far in the future, the duration would overflow.
func dueIn(micros int64) time.Duration {
	return time.Duration(min(micros, (24*time.Hour).Microseconds())) * time.Microsecond
}

// Passed are scheduled messages to pass over.
type Passed struct {
	Seqs []int64
	Keys []string // all messages of these
	UpTo Position // and all messages up to it
}

// Choice selects the due messages that a transaction moves: those up to End that are not
// passed over.
type Choice struct {
	Passed
	End         Position
	Look        int   // how many messages to look at
	Rows        int   // how many of them to move
	Bytes       int64 // of payload and metadata of all; the last message may exceed it
	Least, Most int64 // bytes of each message
	Only        int64 // the Seq of the only message to move; 0: all

	// Singly moves one message after the other for so long. Those that cannot be moved
	// are returned as refused, and do not keep others from moving. 0: all at once.
	Singly time.Duration
}

// MostBytes is the largest size of a row.
const MostBytes = math.MaxInt32

// Batch is the result of MoveDue. After an error it holds what was chosen, as far as
// that is known.
type Batch struct {
	Moved   int
	Chosen  []Scheduled
	Refused []Refusal // of a choice with Singly
	Waiting []string  // keys of which a message was passed over
	Last    Position  // everything up to it was tried, or waits; zero if nothing was found
}

// Refusal is a message that could not be moved.
type Refusal struct {
	Scheduled
	Err *RowError
}

// RowError is an error that a message may have caused: it takes too long, waits for
// locks, or is refused by the outbox or by a trigger on it. Errors of a server that
// serves nobody are none.
type RowError struct {
	TookLong bool
	cause    error
}

func (e *RowError) Error() string { return e.cause.Error() }
func (e *RowError) Unwrap() error { return e.cause }

// singly moves messages one by one.
type singly struct {
	savepoint, release, rollBack string // statements

	one      func(ctx context.Context, tx *sql.Tx, chosen []Scheduled) (moved int, err error)
	rowError func(ctx context.Context, err error) error
}

// move moves the chosen messages of a batch, as many as time permits, so that only refused
// messages and those of their keys remain. It tries at least one.
func (s singly) move(ctx context.Context, tx *sql.Tx, limit time.Duration, b *Batch) error {
	begin := time.Now()
	waiting := map[string]bool{}
	var moved int
	var refused []Refusal
	late := false
	for i, c := range b.Chosen {
		if late || i > 0 && time.Since(begin) > limit {
			b.Last = b.Chosen[i-1].Position
			break
		}
		if waiting[c.Key] {
			continue
		}
		if _, err := tx.ExecContext(ctx, s.savepoint); err != nil {
			return err
		}
		n, err := s.one(ctx, tx, b.Chosen[i:i+1])
		after := s.release
		if err != nil {
			var cause *RowError
			if !errors.As(s.rowError(ctx, err), &cause) {
				return err
			}
			refused = append(refused, Refusal{c, cause})
			waiting[c.Key] = c.Key != ""
			late = cause.TookLong
			after = s.rollBack
		}
		moved += n
		if _, ended := tx.ExecContext(ctx, after); ended != nil {
			if err != nil { // the refusal has ended the transaction: this message is to be alone in one
				b.Chosen = b.Chosen[i : i+1]
				return s.rowError(ctx, err)
			}
			return ended
		}
	}
	b.Moved, b.Refused = moved, refused
	return nil
}

// Moved is the result of outboxqueue.Queue.MoveDue.
type Moved struct {
	Rows int // messages moved into the outbox

	// Next is when to call again at the latest: when the next message is due, or when a
	// lock that blocks a due message may have been released.
	Next time.Duration

	// Limit is how much time to give the next call. It is set if a message is due that
	// is too large for the time of this call; 0: as much as usual. That message stays
	// until a call has so much time. Others pass it, except those of its key.
	Limit time.Duration

	// Failed reports that a message, or a batch, could not be moved. Others, or a
	// smaller batch, may be moved at once.
	Failed bool
}
