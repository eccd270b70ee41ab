package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/contain"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox/payload"
)

// work is a message that is being handled.
type work struct {
	msg         *message.Message
	id          string
	handler     message.HandlerFunc
	fingerprint []byte
	replay      replay
	start       start // what was noted of it before
	failed      bool  // an attempt of this delivery
}

// start is what was noted, in a transaction of its own, before a message that may
// have crashed a process is handled.
type start struct {
	noted   bool
	suspect bool // an earlier one has not ended: nothing else may be handled beside it
	charged bool // with what may happen now: it is alone
}

// attempt is one try to handle a message.
type attempt func(ctx context.Context, w *work) (outcome, error)

func (in *Inbox) middleware(h message.HandlerFunc, try attempt) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		// What h returns is in the outbox: the router has nothing to publish.
		return nil, in.handle(msg.Context(), msg, h, try)
	}
}

// handle handles one delivery.
func (in *Inbox) handle(ctx context.Context, msg *message.Message, h message.HandlerFunc, try attempt) error {
	if to := msg.Metadata.Get(ConsumerMetadata); to != "" && to != in.cfg.Consumer {
		in.telemetry.record(ctx, notForUs)
		return nil
	}
	w := &work{msg: msg, handler: h}
	w.replay, w.id = in.replayed(msg)
	defer w.unmark()()
	err := contain.Call(func() error {
		if w.id == "" {
			w.id = in.cfg.ID(msg)
		}
		return checkMessageID(w.id)
	})
	if err != nil {
		in.telemetry.record(ctx, badMessageID)
		return in.refuse(ctx, w, NoMessageID, err)
	}
	if in.cfg.Verify != nil {
		if err := contain.Call(func() error { return in.cfg.Verify(msg) }); err != nil {
			in.telemetry.record(ctx, unverified)
			in.distrust(ctx, w)
			return in.refuse(ctx, w, Unverified, fmt.Errorf("%w: %w", ErrUnverified, err))
		}
	}
	if in.cfg.Fingerprint != nil {
		if err := contain.Call(func() error { w.fingerprint = in.cfg.Fingerprint(msg); return nil }); err != nil {
			in.telemetry.record(ctx, badPayload)
			return in.refuse(ctx, w, Malformed, err)
		}
	}
	if err := in.checkAge(ctx, w); err != nil {
		if !errors.Is(err, ErrTooOld) {
			return err
		}
		in.telemetry.record(ctx, tooOld)
		return in.refuse(ctx, w, TooOld, err)
	}
	if err := in.noteStart(ctx, w); err != nil {
		return err
	}
	return in.try(ctx, w, try)
}

// unmark takes the marks of a replay from the message, so that a handler that passes
// metadata on does not pass them on. What is outside of the inbox has the message as it
// came.
func (w *work) unmark() (restore func()) {
	marked := w.msg.Metadata
	if marked[ReplayMetadata] == "" && marked[ConsumerMetadata] == "" {
		return func() {}
	}
	w.msg.Metadata = maps.Clone(marked)
	for _, name := range []string{ReplayMetadata, ConsumerMetadata, replayIDMetadata} {
		delete(w.msg.Metadata, name)
	}
	return func() { w.msg.Metadata = marked }
}

// try attempts a message until it is handled or this delivery of it is given up.
func (in *Inbox) try(ctx context.Context, w *work, try attempt) error {
	const collisionsAtMost, lossesAtMost = 10, 2
	for attempts, collisions, losses := 0, 0, 0; ; {
		result, fate, err := in.once(ctx, w, try)
		in.telemetry.record(ctx, result)
		var again time.Duration
		if fate == cutOff {
			// Most likely it was not the message's doing, but a message that costs
			// its connection every time must come to an end.
			if losses++; losses <= lossesAtMost {
				fate = collided
			} else {
				fate = failed
			}
		}
		switch fate {
		case settled:
			return nil
		case crashed:
			return in.refuse(ctx, w, Crashed, err)
		case conflicting:
			in.noteEnd(ctx, w)
			return in.refuse(ctx, w, Conflict, err)
		case away: // once waits for its end
			continue
		case gap:
			in.noteEnd(ctx, w)
			giveWay(ctx)
			delayNack(ctx, jitter(comeAgain))
			return err
		case elsewhere, ending:
			in.noteEnd(ctx, w)
			delayNack(ctx, jitter(comeAgain))
			return err
		case collided:
			if collisions++; collisions == collisionsAtMost {
				in.noteEnd(ctx, w)
				delayNack(ctx, jitter(in.cfg.Retry.Backoff))
				return err
			}
			again = jitter(double(5*time.Millisecond, collisions-1, in.cfg.Retry.Backoff))
		case failed:
			attempts++
			w.failed = true
			p := policyOf(err)
			if p.permanent || p.after > 0 || attempts >= in.cfg.Retry.Tries {
				return in.giveUp(ctx, w, err)
			}
			again = in.cfg.Retry.backoff(attempts)
		}
		if !pause(ctx, again) {
			in.noteEnd(ctx, w)
			return err
		}
	}
}

// comeAgain is the time to the redelivery of a message that another copy of is
// being handled, on average. The claim has waited for it already.
const comeAgain = 500 * time.Millisecond

// fate is what an attempt means for its message.
type fate int

const (
	settled     fate = iota // it is handled, or was before
	failed                  // by its handler
	collided                // with another transaction, which is no attempt
	elsewhere               // a copy of it is being handled, or what became of it is not known
	away                    // the database, or what the handler needs
	cutOff                  // its connection was lost, but the database is there
	gap                     // it waits for one before it
	ending                  // its context has ended
	crashed                 // too many processes have died of it
	conflicting             // its id was used for another
)

// once is one attempt, let through by the gate.
func (in *Inbox) once(ctx context.Context, w *work, try attempt) (result outcome, f fate, err error) {
	probe, err := in.gate.enter(ctx)
	if err != nil {
		return waiting, ending, err
	}
	outage := false
	// Also when the handler ends its goroutine.
	defer func() {
		if in.gate.leave(probe, outage) {
			in.logOutage(ctx, outage, err)
		}
	}()
	room := int64(1)
	if w.start.suspect {
		room = wholeRoom
	}
	if err := in.room.Acquire(ctx, room); err != nil {
		return waiting, ending, err
	}
	defer in.room.Release(room)
	if result, err = in.charge(ctx, w); err == nil {
		result = handlerFailed // if it panics
		err = contain.Call(func() (err error) {
			result, err = in.decoded(ctx, w, try)
			return err
		})
	}
	if cause := err; cause != nil && in.cfg.Classify != nil && result == handlerFailed {
		if panicked := contain.Call(func() error { err = in.cfg.Classify(cause); return nil }); panicked != nil {
			err = errors.Join(cause, panicked)
		}
	}
	f = fateOf(ctx, result, err)
	// A standby answers, but takes no writes.
	if result == databaseAway && f == away && !sqlerr.ReadOnly(err) && in.ping(ctx) == nil {
		f = cutOff
		if noAnswer(err) {
			f = elsewhere // whose connection it was is chance
		}
	}
	outage = f == away
	return result, f, err
}

func fateOf(ctx context.Context, result outcome, err error) fate {
	switch {
	case err == nil:
		return settled
	case errors.Is(err, ErrConflict):
		return conflicting
	case result == crashLoop:
		return crashed
	case errors.Is(err, context.Canceled) && ctx.Err() != nil, result == waiting:
		return ending
	case result == beingHandled, result == commitUnknown, result == databaseFailed:
		return elsewhere
	case errors.Is(err, ErrGap):
		return gap
	case result == databaseAway, policyOf(err).unavailable:
		return away
	case heldElsewhere(err), sqlerr.Retryable(err):
		return collided
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		return ending
	}
	return failed
}

func (in *Inbox) logOutage(ctx context.Context, begins bool, err error) {
	if begins {
		in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "consumption paused, something is unavailable",
			slog.String("consumer", in.cfg.Consumer), slog.Any("error", err))
		return
	}
	in.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "consumption goes on", slog.String("consumer", in.cfg.Consumer))
}

// giveUp notes that a delivery has failed. It returns nil if the message has
// become a dead letter.
func (in *Inbox) giveUp(ctx context.Context, w *work, err error) error {
	p := policyOf(err)
	if in.cfg.DeadLetters == nil {
		if p.after > 0 {
			delayNack(ctx, p.after)
		}
		return err
	}
	if broken := (*payload.DecodeError)(nil); errors.As(err, &broken) {
		in.distrust(ctx, w)
	}
	detached, cancel := in.detach(ctx)
	defer cancel()
	id, begun := w.id, w.start
	rec, recErr := ask(detached, in, func(ctx context.Context) (record, error) {
		return in.store.recordFailure(ctx, id, begun, err)
	})
	if recErr != nil {
		delayNack(ctx, in.cfg.Retry.delay(1))
		return errors.Join(err, fmt.Errorf("record failure: %w", recErr))
	}
	w.start = start{}
	if !p.permanent && rec.failures < in.cfg.Retry.Deliveries {
		delayNack(ctx, max(p.after, in.cfg.Retry.delay(rec.failures)))
		return err
	}
	reason := Failed
	if p.permanent {
		reason = PermanentErr
	}
	letter := in.newLetter(ctx, w.msg, w.id, reason, err)
	letter.Attempts, letter.Errors = rec.failures, rec.errors
	return in.deadLetter(ctx, w, letter)
}

// refuse makes a dead letter of a message that is not to be handled; without
// dead letters it is an error as any other.
func (in *Inbox) refuse(ctx context.Context, w *work, reason Reason, err error) error {
	if in.cfg.DeadLetters == nil {
		return err
	}
	id := w.id
	if reason == NoMessageID {
		id = ""
	}
	return in.deadLetter(ctx, w, in.newLetter(ctx, w.msg, id, reason, err))
}

func (in *Inbox) deadLetter(ctx context.Context, w *work, letter *Letter) error {
	detached, cancel := in.detach(ctx)
	defer cancel()
	if err := in.bury(detached, letter, w.replay); err != nil {
		delayNack(ctx, in.cfg.Retry.delay(1))
		return fmt.Errorf("%s: %w", letter.Error, err)
	}
	in.telemetry.record(ctx, deadLetter)
	in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "message became a dead letter", slog.String("consumer", in.cfg.Consumer),
		slog.String("topic", letter.Topic), slog.String("message_id", letter.MessageID), slog.String("reason", string(letter.Reason)), slog.String("error", letter.Error))
	return nil
}

// noteStart counts a delivery that the broker has marked as repeated before it is
// handled, so that a message that takes the process down is found.
func (in *Inbox) noteStart(ctx context.Context, w *work) error {
	d, ok := DeliveryFromContext(ctx)
	if in.cfg.DeadLetters == nil || !ok || !d.Redelivered() {
		return nil
	}
	for {
		probe, err := in.gate.enter(ctx)
		if err != nil {
			return err
		}
		id, marked := w.id, w.replay.marked
		w.start, err = ask(ctx, in, func(ctx context.Context) (start, error) { return in.store.noteStart(ctx, id, marked) })
		outage := err != nil && ctx.Err() == nil && sqlerr.Connection(err)
		if in.gate.leave(probe, outage) {
			in.logOutage(ctx, outage, err)
		}
		if outage {
			continue
		}
		if err != nil {
			return fmt.Errorf("note start: %w", err)
		}
		return nil
	}
}

// charge counts, in a transaction of its own, the attempt of a suspect that is
// alone now: if the process ends it is the message's doing, and not that of
// another that was being handled.
func (in *Inbox) charge(ctx context.Context, w *work) (outcome, error) {
	if !w.start.suspect || w.start.charged {
		return handled, nil
	}
	id := w.id
	alone, err := ask(ctx, in, func(ctx context.Context) (int, error) { return in.store.charge(ctx, id) })
	if err != nil {
		return claimFailed(err), fmt.Errorf("charge suspect: %w", err)
	}
	if alone > in.cfg.Retry.Crashes {
		return crashLoop, ErrCrashed
	}
	w.start.charged = true
	return handled, nil
}

// noteEnd takes back what noteStart noted. If it cannot, the message is taken for
// one that crashed, once, alone and without harm.
func (in *Inbox) noteEnd(ctx context.Context, w *work) {
	if !w.start.noted {
		return
	}
	detached, cancel := in.detach(ctx)
	defer cancel()
	id, begun := w.id, w.start
	_, err := ask(detached, in, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, in.store.noteEnd(ctx, id, begun)
	})
	if err != nil {
		in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "end of an attempt not noted",
			slog.String("message_id", w.id), slog.Any("error", err))
		return
	}
	w.start = start{}
}

// checkAge refuses a message whose id may have been forgotten.
func (in *Inbox) checkAge(ctx context.Context, w *work) error {
	d, ok := DeliveryFromContext(ctx)
	if !ok || in.cfg.DeadLetters == nil || w.replay.marked {
		return nil
	}
	created := d.CreatedAt()
	// The database is asked for its clock only where it may matter.
	if created.IsZero() || time.Since(created) < in.cfg.Retention/2 {
		return nil
	}
	now, err := ask(ctx, in, in.store.now)
	if err != nil {
		return fmt.Errorf("check age: %w", err)
	}
	if age := now.Sub(created); age > in.cfg.Retention-in.margin() {
		return fmt.Errorf("%w: created at %s, %s ago", ErrTooOld, created.UTC().Format(time.RFC3339), age.Round(time.Second))
	}
	return nil
}

// margin covers the clocks of two databases, and the time that a message may
// spend between the check and its claim.
func (in *Inbox) margin() time.Duration { return min(time.Hour, in.cfg.Retention/10) }

func (in *Inbox) ping(ctx context.Context) error {
	_, err := ask(ctx, in, func(ctx context.Context) (struct{}, error) { return struct{}{}, in.store.ping(ctx) })
	return err
}

// detach returns a context for what must be written though that of the message
// may have ended.
func (in *Inbox) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), callLimit)
}

// giveWay asks the subscriber to let the rest of the key pass.
func giveWay(ctx context.Context) {
	if delivery, ok := DeliveryFromContext(ctx); ok {
		delivery.GiveWay()
	}
}

// delayNack asks the subscriber, if it can, for a delayed redelivery.
func delayNack(ctx context.Context, d time.Duration) {
	if delivery, ok := DeliveryFromContext(ctx); ok {
		delivery.DelayNack(d)
	}
}
