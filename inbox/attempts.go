package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// try attempts a message until it is handled or its delivery has failed.
func (in *Inbox) try(ctx context.Context, w *work, try attempt) error {
	const collisionsAtMost, lossesAtMost = 10, 2
	for collisions, losses := 0, 0; ; {
		result, fate, err := in.once(ctx, w, try)
		in.telemetry.record(ctx, w, result)
		var again time.Duration
		if fate == fateConnectionLost {
			// Most likely the message is not at fault, but a message that loses its
			// connection every time must not be tried without end.
			if losses++; losses <= lossesAtMost {
				fate = fateContended
			} else {
				fate = fateFailed
			}
		}
		switch fate {
		case fateHandled:
			if key, seq := in.positionOf(w); seq != nil { // a duplicate, too
				in.gaps.forget(key, w.id)
			}
			return nil
		case fateCrashed:
			return in.refuse(ctx, w, ReasonCrashed, err)
		case fateConflict:
			in.recordEnd(ctx, w)
			return in.refuse(ctx, w, ReasonConflict, err)
		case fateDatabaseDown: // once waits for the end of the outage
			continue
		case fateGap:
			in.recordEnd(ctx, w)
			in.comeAfter(ctx, w)
			return err
		case fateElsewhere, fateEnded:
			in.recordEnd(ctx, w)
			delayNack(ctx, in.jitter(comeAgain))
			return err
		case fateUnavailable:
			if in.cfg.Sequence != nil {
				return in.putOff(ctx, w, err) // so that the messages behind it wait for it
			}
			in.recordEnd(ctx, w)
			delayNack(ctx, in.delay(nacksOf(ctx)+1))
			return err
		case fateUnavailableAlone:
			return in.giveUp(ctx, w, err)
		case fateContended:
			if collisions++; collisions == collisionsAtMost {
				in.recordEnd(ctx, w)
				delayNack(ctx, in.jitter(in.cfg.Retry.Backoff))
				return err
			}
			again = in.jitter(double(5*time.Millisecond, collisions-1, in.cfg.Retry.Backoff))
		case fateFailed:
			w.tries++
			p := policyOf(err)
			if p.permanent || p.after > 0 || w.tries >= in.cfg.Retry.Tries {
				return in.giveUp(ctx, w, err)
			}
			again = in.backoff(w.tries)
		}
		if !sleep.For(ctx, again) {
			if w.tries > 0 && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return in.giveUp(ctx, w, err)
			}
			in.recordEnd(ctx, w)
			return err
		}
	}
}

// comeAgain is the average time to the redelivery of a message of which another copy is
// being handled. The claim has already waited for that copy.
const comeAgain = 500 * time.Millisecond

// fate is what an attempt means for its message.
type fate int

const (
	fateHandled          fate = iota // handled, now or before
	fateFailed                       // the handler failed
	fateContended                    // lost against another transaction; not an attempt
	fateElsewhere                    // a copy is being handled, or the outcome is unknown
	fateDatabaseDown                 // the database is unavailable
	fateUnavailable                  // something that the handler needs is unavailable
	fateUnavailableAlone             // the same, but it is available to other messages
	fateConnectionLost               // the connection was lost, but the database is available
	fateGap                          // waits for an earlier message
	fateEnded                        // the context ended before the handler ran
	fateCrashed                      // crashed too many processes
	fateConflict                     // its id belongs to another message
)

// once makes one attempt, after the gate has let it through.
func (in *Inbox) once(ctx context.Context, w *work, try attempt) (result outcome, f fate, err error) {
	if err := in.awaitResumed(ctx); err != nil { // it may have been paused since the last attempt
		return outcomeWaiting, fateEnded, err
	}
	probe, err := in.gate.enter(ctx)
	if err != nil {
		return outcomeWaiting, fateEnded, err
	}
	seen, key := reportNothing, w.id
	// Also when the handler ends its goroutine.
	defer func() {
		turned, alone := in.gate.leave(probe, seen, key)
		in.logOutage(ctx, turned, probe != 0 && in.gate.shut(), seen == reportDown || seen == reportMissing, err)
		if f == fateUnavailable && alone {
			f = fateUnavailableAlone
		}
	}()
	leave, err := in.isolate(ctx, w)
	if err != nil {
		return outcomeWaiting, fateEnded, err
	}
	defer leave()
	if result, err = in.charge(ctx, w); err == nil {
		result = outcomeHandlerFailed // if it panics
		err = nopanic.Call(func() (err error) {
			result, err = try(ctx, w)
			return err
		})
	}
	if cause := err; cause != nil && in.cfg.Classify != nil && result == outcomeHandlerFailed {
		if panicked := nopanic.Call(func() error { err = in.cfg.Classify(cause); return nil }); panicked != nil {
			err = errors.Join(cause, panicked)
		} else if err == nil { // the transaction was rolled back all the same
			err = cause
		}
	}
	f = fateOf(ctx, result, err)
	// A standby answers, but accepts no writes. The ping needs a context that has not ended:
	// the message's context says nothing about the database.
	if f == fateDatabaseDown && !sqlerr.ReadOnly(err) && in.ping(context.WithoutCancel(ctx)) == nil {
		f = fateConnectionLost
		if noAnswer(err) {
			f = fateElsewhere // any message could have had this connection
		}
	}
	switch {
	case f == fateDatabaseDown:
		seen = reportDown
	case f == fateUnavailable:
		seen = reportMissing
		if k := in.keyOf(w.msg); k != "" {
			key = k
		}
	case result == outcomeHandled:
		seen = reportWorking
	case f == fateFailed:
		seen = reportAnswering
	}
	return result, f, err
}

// readFailed reads how many deliveries of the message have failed, for its handler.
func (in *Inbox) readFailed(ctx context.Context, tx *boundtx.Tx, w *work) (err error) {
	if !cameBefore(ctx) || w.tries > 0 {
		return nil
	}
	id := w.id
	w.before, err = within(ctx, tx, func(ctx context.Context, tx *sql.Tx) (before [2]int, err error) {
		before[0], before[1], err = in.store.FailedDeliveries(ctx, tx, id)
		return before, err
	})
	if err != nil {
		return fmt.Errorf("read failed deliveries: %w", err)
	}
	return nil
}

func (in *Inbox) attemptOf(w *work) Attempt {
	retry := in.cfg.Retry
	last := w.tries+1 >= retry.Tries && w.before[0]+1 >= retry.Deliveries
	return Attempt{
		Delivery: w.before[0] + w.before[1] + 1,
		Try:      w.tries + 1,
		Last:     last && in.cfg.DeadLetters != nil,
	}
}

// fateOf returns what an attempt means for its message. A context error never counts as a
// connection error: once the handler has begun, the message has used up its own time.
func fateOf(ctx context.Context, result outcome, err error) fate {
	switch {
	case err == nil:
		return fateHandled
	case errors.Is(err, ErrConflict):
		return fateConflict
	case result == outcomeCrashed:
		return fateCrashed
	case result == outcomeWaiting, errors.Is(ctx.Err(), context.Canceled):
		return fateEnded
	case result == outcomeBeingHandled, result == outcomeCommitUnknown, result == outcomeDatabaseFailed:
		return fateElsewhere
	case errors.Is(err, ErrGap):
		return fateGap
	case result == outcomeDatabaseDown:
		return fateDatabaseDown
	case policyOf(err).unavailable:
		return fateUnavailable
	case sqlerr.Contended(err):
		return fateContended
	}
	return fateFailed
}

// logOutage logs that the gate was turned, and at growing intervals that it is still closed.
func (in *Inbox) logOutage(ctx context.Context, turned, probe, away bool, err error) {
	switch {
	case away && (turned || probe):
		level, attrs := in.failing.outage.Failed(slog.LevelWarn, in.textOf(err))
		in.cfg.Logger.Log(ctx, level, "consumption paused: the database or something that handlers need is unavailable",
			append(attrs, "consumer", in.cfg.Consumer, "error", in.textOf(err))...)
	case turned:
		if attrs, report := in.failing.outage.Over(); report {
			in.cfg.Logger.InfoContext(ctx, "consumption resumed", append(attrs, "consumer", in.cfg.Consumer)...)
		}
	}
}
