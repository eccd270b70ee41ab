package outboxqueue

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

const (
	moveIdle = time.Second // something may be scheduled for an earlier time meanwhile
	moveHeld = 50 * time.Millisecond
)

// MoveDue moves a batch of due scheduled messages into the outbox, by due time, then
// publish order, and wakes the relays of this process. If nothing is due, it is one
// statement that reads the first message. guard is as in [Queue.Maintain]. Only one
// process at a time may call it, or the order of keys is lost.
//
// A message that an open transaction cancels, and the later ones of its key, are passed
// over until that transaction has ended.
func (q *Queue) MoveDue(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (outboxstore.Moved, error) {
	head, err := q.scheduler.nextDue(ctx)
	if err != nil {
		return outboxstore.Moved{Next: moveIdle}, fmt.Errorf("look for what is due: %w", err)
	}
	if head.In > 0 {
		return outboxstore.Moved{Next: min(head.In, moveIdle)}, nil
	}
	moved, err := q.scheduler.move(ctx, guard, head)
	switch {
	case err != nil:
		moved.Next = moveIdle
		return moved, fmt.Errorf("move what is due: %w", err)
	case moved.Rows > 0:
		q.box.Wake()
	default:
		moved.Next = moveHeld
	}
	return moved, nil
}

// scheduler moves scheduled messages into the outbox when they are due.
type scheduler struct {
	store outboxstore.Store
	log   *slog.Logger
	state *moveState
}

func newScheduler(store outboxstore.Store, log *slog.Logger) scheduler {
	return scheduler{store: store, log: log, state: newMoveState()}
}

func (s *scheduler) nextDue(ctx context.Context) (outboxstore.Due, error) {
	head, found, err := s.store.NextDue(ctx, s.state.passed())
	switch {
	case err != nil:
		return outboxstore.Due{}, err
	case !found:
		head.In = moveIdle
	}
	if s.state.retryIn(time.Now()) <= 0 {
		head.In = 0
	}
	return head, nil
}

// besideMove is how long a call may take in addition to the statement that moves a
// large message. On a busy server the look for it takes long, too; a call with no time
// left would be repeated forever.
const besideMove = 5 * time.Second

var moveLimits = shorttx.Limits{Lock: 500 * time.Millisecond, Statement: 3 * time.Second}

// singlyLimit is how long a transaction moves messages one by one.
const singlyLimit = 750 * time.Millisecond

// move moves a batch. A message larger than a batch is moved alone, with more time,
// once it is the first one due or the others wait. Until then others pass it, except
// those of its key. A message that cannot be moved, for a reason of its own, is
// postponed and retried alone.
func (s *scheduler) move(ctx context.Context, guard outboxstore.Guard, head outboxstore.Due) (outboxstore.Moved, error) {
	rows, bytes := s.state.batch()
	one, again := s.state.retry(time.Now())
	after, upTo, inRound := s.state.inRound(time.Now())
	large := head.Bytes > bytes && s.state.tryLarge(time.Now())
	moved, err := outboxstore.Moved{}, error(nil)
	what := s.state.takeTurn(again, inRound, large)
	switch what {
	case attemptPostponed:
		only := outboxstore.Choice{Passed: outboxstore.Passed{UpTo: outboxstore.Beginning}, End: outboxstore.End, Rows: 1, Bytes: bytes, Most: outboxstore.MostBytes, Only: one.Seq}
		moved, err = s.moveAlone(ctx, guard, only, one.bytes)
	case attemptRound:
		round := outboxstore.Choice{Passed: s.state.passed(), End: upTo, Rows: rows, Bytes: math.MaxInt64, Most: outboxstore.MostBytes, Singly: singlyLimit}
		round.UpTo = after
		moved, err = s.goRound(ctx, guard, round)
	case attemptLarge:
		moved, err = s.moveAlone(ctx, guard, s.largerThan(bytes), head.Bytes)
	}
	if moved.Limit > 0 {
		s.state.turnAgain(what)
	}
	if err != nil || moved.Rows > 0 && what == attemptLarge {
		return moved, err
	}
	others, err := s.moveSmall(ctx, guard, rows, bytes)
	others.Rows, others.Limit, others.Failed = others.Rows+moved.Rows, moved.Limit, others.Failed || moved.Failed
	if err != nil || others.Rows > 0 || others.Limit > 0 || !s.state.tryLarge(time.Now()) {
		return others, err
	}
	size, err := s.store.NextLarge(ctx, s.state.passed(), bytes)
	if err != nil || size == 0 {
		return others, err
	}
	moved, err = s.moveAlone(ctx, guard, s.largerThan(bytes), size)
	moved.Failed = moved.Failed || others.Failed
	return moved, err
}

// largerThan returns the choice of the first large message.
func (s *scheduler) largerThan(bytes int64) outboxstore.Choice {
	return outboxstore.Choice{Passed: s.state.passed(), End: outboxstore.End, Rows: 1, Bytes: bytes, Least: bytes + 1, Most: outboxstore.MostBytes}
}

// moveAlone moves one message, with a time limit for its size.
func (s *scheduler) moveAlone(ctx context.Context, guard outboxstore.Guard, c outboxstore.Choice, bytes int64) (outboxstore.Moved, error) {
	limits := shorttx.Limits{Lock: moveLimits.Lock, Statement: s.state.large(c.Only, bytes)}
	if deadline, limited := ctx.Deadline(); limited && time.Until(deadline) < limits.Statement {
		return outboxstore.Moved{Limit: limits.Statement + besideMove}, nil
	}
	begin := time.Now()
	batch, err := s.moveBatch(ctx, limits, guard, c)
	cause, ofMessage := messageError(ctx, err)
	switch {
	case err == nil && batch.Moved > 0:
		s.state.movedAlone(c.Only, bytes, time.Since(begin), limits.Statement)
		return outboxstore.Moved{Rows: batch.Moved}, nil
	case err == nil: // canceled, or waits for another one of its key
		s.state.forget(c.Only)
		return outboxstore.Moved{}, nil
	case len(batch.Chosen) == 1 && ofMessage:
		s.postpone(ctx, outboxstore.Refusal{Scheduled: batch.Chosen[0], Err: cause}, bytes, limits.Statement, false)
		return outboxstore.Moved{Failed: true}, nil
	case errors.Is(err, errKeysWait):
		s.leaveToRounds(ctx, batch.Last, err)
		return outboxstore.Moved{Failed: true}, nil
	}
	s.state.skip(c.Only, time.Now())
	return outboxstore.Moved{}, s.unlessOthersGoOn(ctx, err)
}

// goRound continues the round, as far as time permits.
func (s *scheduler) goRound(ctx context.Context, guard outboxstore.Guard, c outboxstore.Choice) (outboxstore.Moved, error) {
	limits := shorttx.Limits{Lock: moveLimits.Lock, Statement: s.state.large(0, 0)}
	if deadline, limited := ctx.Deadline(); limited && time.Until(deadline) < limits.Statement {
		return outboxstore.Moved{Limit: limits.Statement + besideMove}, nil
	}
	batch, err := s.moveBatch(ctx, limits, guard, c)
	switch {
	case err != nil:
		s.state.roundLater(time.Now())
		return outboxstore.Moved{}, s.unlessOthersGoOn(ctx, err)
	case batch.Last == (outboxstore.Position{}):
		s.state.roundOver(time.Now())
	default:
		s.state.wentTo(batch.Last)
	}
	return outboxstore.Moved{Rows: batch.Moved, Failed: true}, nil
}

// unlessOthersGoOn returns err if the server serves nobody.
func (s *scheduler) unlessOthersGoOn(ctx context.Context, err error) error {
	if ctx.Err() != nil || sqlerr.State(err) == "" {
		return err
	}
	s.log.WarnContext(ctx, "looking for a scheduled message failed; others go on", "error", err)
	return nil
}

// messageError returns the error that a message may have caused.
func messageError(ctx context.Context, err error) (cause *outboxstore.RowError, is bool) {
	is = ctx.Err() == nil && errors.As(err, &cause)
	return cause, is
}

func (s *scheduler) postpone(ctx context.Context, r outboxstore.Refusal, bytes int64, limit time.Duration, inRound bool) {
	wait := s.state.postpone(r.Scheduled, bytes, limit, r.Err.TookLong, inRound, time.Now())
	others, due := s.state.logs(time.Now())
	if due {
		s.log.ErrorContext(ctx, "scheduled message cannot be moved to the outbox; it and those of its key wait, trying again later",
			"seq", r.Seq, "bytes", bytes, "limit", limit, "retry_in", wait, "others_since", others, "error", r.Err)
	}
}

// moveSmall moves a batch of rows of at most the given bytes each, and adapts the batch
// to the time that takes. A batch that fails is made smaller, down to the row that is
// the cause.
func (s *scheduler) moveSmall(ctx context.Context, guard outboxstore.Guard, rows int, bytes int64) (outboxstore.Moved, error) {
	limits := moveLimits
	if within := shorttx.Within(ctx); within.Statement < limits.Statement {
		limits.Statement = within.Statement // the server should report what is slow before the caller gives up
	}
	begin := time.Now()
	c := outboxstore.Choice{Passed: s.state.passed(), End: outboxstore.End, Rows: rows, Bytes: bytes, Most: bytes}
	batch, err := s.moveBatch(ctx, limits, guard, c)
	cause, ofMessage := messageError(ctx, err)
	if ofMessage && !cause.TookLong && len(batch.Chosen) > 1 && time.Since(begin) < limits.Statement/2 {
		c.Singly = singlyLimit
		batch, err = s.moveBatch(ctx, limits, guard, c)
		cause, ofMessage = messageError(ctx, err)
	}
	switch {
	case err == nil:
		s.state.took(time.Since(begin), limits.Statement)
		return outboxstore.Moved{Rows: batch.Moved, Failed: c.Singly > 0}, nil
	case errors.Is(err, errKeysWait):
		s.leaveToRounds(ctx, batch.Last, err)
		return outboxstore.Moved{Failed: true}, nil
	case ctx.Err() == nil && !ofMessage && !sqlerr.TimedOut(err), errors.Is(ctx.Err(), context.Canceled):
		return outboxstore.Moved{}, err
	case ofMessage && len(batch.Chosen) == 1 && (rows == 1 || !cause.TookLong):
		s.postpone(ctx, outboxstore.Refusal{Scheduled: batch.Chosen[0], Err: cause}, 0, limits.Statement, false)
		return outboxstore.Moved{Failed: true}, nil
	case ctx.Err() != nil, !s.state.slower():
		return outboxstore.Moved{}, err // the server is silent, or the batch cannot be smaller
	}
	s.log.WarnContext(ctx, "moving scheduled messages failed; moving fewer at a time", "rows", rows, "bytes", bytes, "error", err)
	return outboxstore.Moved{Failed: true}, nil
}

// errKeysWait means that more keys wait than a look passes over.
var errKeysWait = errors.New("too many keys of scheduled messages wait for transactions that cancel one, or for a message that cannot be moved")

// leaveToRounds leaves to rounds the range in which more keys wait than a look passes
// over.
func (s *scheduler) leaveToRounds(ctx context.Context, upTo outboxstore.Position, err error) {
	now := time.Now()
	s.state.leave(upTo, now)
	if _, due := s.state.logs(now); due {
		s.log.WarnContext(ctx, "scheduled messages up to this time are tried less often", "deliver_at", upTo.At, "error", err)
	}
}

// moveBatch moves the first due messages of a choice. If the keys of all those that it
// has looked at wait, it looks further.
func (s *scheduler) moveBatch(ctx context.Context, limits shorttx.Limits, guard outboxstore.Guard, c outboxstore.Choice) (outboxstore.Batch, error) {
	postponed := len(c.Keys)
	for c.Look = c.Rows; ; c.Look = min(2*c.Look, mostBatchRows) {
		batch, err := s.store.MoveDue(ctx, guard, limits, c)
		for _, r := range batch.Refused {
			s.postpone(ctx, r, 0, limits.Statement, c.End != outboxstore.End)
		}
		// If all the first rows wait, others may not. A round continues behind them.
		if err != nil || batch.Moved > 0 || len(batch.Refused) > 0 || len(batch.Waiting) == 0 || c.Only != 0 || c.End != outboxstore.End {
			return batch, err
		}
		c.Keys = slices.Concat(c.Keys, batch.Waiting)
		if len(c.Keys)-postponed > s.state.mostWaiting {
			return batch, errKeysWait
		}
	}
}
