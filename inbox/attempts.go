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
		in.telemetry.record(ctx, result)
		var again time.Duration
		if fate == cutOff {
			// Most likely the message is not at fault, but a message that loses its
			// connection every time must not be tried without end.
			if losses++; losses <= lossesAtMost {
				fate = collided
			} else {
				fate = failed
			}
		}
		switch fate {
		case settled:
			if key, seq := in.positionOf(w); seq != nil { // a duplicate, too
				in.gaps.forget(key, w.id)
			}
			return nil
		case crashed:
			return in.refuse(ctx, w, ReasonCrashed, err)
		case conflicting:
			in.recordEnd(ctx, w)
			return in.refuse(ctx, w, ReasonConflict, err)
		case away: // once waits for the end of the outage
			continue
		case gap:
			in.recordEnd(ctx, w)
			in.comeAfter(ctx, w)
			return err
		case elsewhere, ending:
			in.recordEnd(ctx, w)
			delayNack(ctx, jitter(comeAgain))
			return err
		case lacking:
			if in.cfg.Sequence != nil {
				return in.putOff(ctx, w, err) // so that the messages behind it wait for it
			}
			in.recordEnd(ctx, w)
			delayNack(ctx, in.cfg.Retry.delay(nacksOf(ctx)+1))
			return err
		case lackingAlone:
			return in.giveUp(ctx, w, err)
		case collided:
			if collisions++; collisions == collisionsAtMost {
				in.recordEnd(ctx, w)
				delayNack(ctx, jitter(in.cfg.Retry.Backoff))
				return err
			}
			again = jitter(double(5*time.Millisecond, collisions-1, in.cfg.Retry.Backoff))
		case failed:
			w.tries++
			p := policyOf(err)
			if p.permanent || p.after > 0 || w.tries >= in.cfg.Retry.Tries {
				return in.giveUp(ctx, w, err)
			}
			again = in.cfg.Retry.backoff(w.tries)
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
	settled      fate = iota // handled, now or before
	failed                   // the handler failed
	collided                 // lost against another transaction; not an attempt
	elsewhere                // a copy is being handled, or the outcome is unknown
	away                     // the database is unavailable
	lacking                  // something that the handler needs is unavailable
	lackingAlone             // the same, but it is available to other messages
	cutOff                   // the connection was lost, but the database is available
	gap                      // waits for an earlier message
	ending                   // the context ended before the handler ran
	crashed                  // crashed too many processes
	conflicting              // its id belongs to another message
)

// once makes one attempt, after the gate has let it through.
func (in *Inbox) once(ctx context.Context, w *work, try attempt) (result outcome, f fate, err error) {
	probe, err := in.gate.enter(ctx)
	if err != nil {
		return waiting, ending, err
	}
	seen, key := nothing, w.id
	// Also when the handler ends its goroutine.
	defer func() {
		turned, alone := in.gate.leave(probe, seen, key)
		if turned {
			in.logOutage(ctx, seen == down || seen == missing, err)
		}
		if f == lacking && alone {
			f = lackingAlone
		}
	}()
	leave, err := in.isolate(ctx, w)
	if err != nil {
		return waiting, ending, err
	}
	defer leave()
	if result, err = in.charge(ctx, w); err == nil {
		result = handlerFailed // if it panics
		err = nopanic.Call(func() (err error) {
			result, err = try(ctx, w)
			return err
		})
	}
	if cause := err; cause != nil && in.cfg.Classify != nil && result == handlerFailed {
		if panicked := nopanic.Call(func() error { err = in.cfg.Classify(cause); return nil }); panicked != nil {
			err = errors.Join(cause, panicked)
		}
	}
	f = fateOf(ctx, result, err)
	// A standby answers, but accepts no writes. The ping needs a context that has not ended:
	// the message's context says nothing about the database.
	if f == away && !sqlerr.ReadOnly(err) && in.ping(context.WithoutCancel(ctx)) == nil {
		f = cutOff
		if noAnswer(err) {
			f = elsewhere // any message could have had this connection
		}
	}
	switch {
	case f == away:
		seen = down
	case f == lacking:
		seen = missing
		if k := in.keyOf(w.msg); k != "" {
			key = k
		}
	case result == handled:
		seen = working
	case f == failed:
		seen = answering
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
		return settled
	case errors.Is(err, ErrConflict):
		return conflicting
	case result == crashLoop:
		return crashed
	case result == waiting, errors.Is(ctx.Err(), context.Canceled):
		return ending
	case result == beingHandled, result == commitUnknown, result == databaseFailed:
		return elsewhere
	case errors.Is(err, ErrGap):
		return gap
	case result == databaseAway:
		return away
	case policyOf(err).unavailable:
		return lacking
	case sqlerr.Contended(err):
		return collided
	}
	return failed
}

func (in *Inbox) logOutage(ctx context.Context, begins bool, err error) {
	if begins {
		in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "consumption paused, something is unavailable",
			slog.String("consumer", in.cfg.Consumer), slog.String("error", in.textOf(err)))
		return
	}
	in.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "consumption goes on", slog.String("consumer", in.cfg.Consumer))
}
