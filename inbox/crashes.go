package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// start is the record, committed before the handler runs, of a message that may have crashed
// a process.
type start struct {
	inboxstore.Start      // Unended: the message must be handled alone
	charged          bool // an attempt was counted: the message is alone
	beside           bool // beside handlers that do not return: no attempt is counted
}

var errEarly = errors.New("inbox: the message is to be handled later")

// recordStart counts a delivery that the broker has marked as redelivered before it is
// handled, so that a message that crashes the process is found. A delivery that arrives
// before its time is delayed again.
func (in *Inbox) recordStart(ctx context.Context, w *work) error {
	d, ok := DeliveryFromContext(ctx)
	if in.cfg.DeadLetters == nil || !ok || !d.Redelivered() {
		return nil
	}
	for {
		probe, err := in.gate.enter(ctx)
		if err != nil {
			return err
		}
		id, replay := w.id, w.replay != nil
		w.start.Start, err = ask(ctx, in, func(ctx context.Context) (inboxstore.Start, error) { return in.store.RecordStart(ctx, id, replay) })
		seen := reportNothing
		if err != nil && ctx.Err() == nil && sqlerr.Connection(err) {
			seen = reportDown
		}
		turned, _ := in.gate.leave(probe, seen, id)
		in.logOutage(ctx, turned, probe != 0 && in.gate.shut(), seen == reportDown, err)
		switch {
		case seen == reportDown:
			continue
		case err != nil:
			return fmt.Errorf("record start: %w", err)
		case w.start.Early > earlyEnough && d.Nacks() == 0:
			delayNack(ctx, w.start.Early)
			in.recordEnd(ctx, w)
			return errEarly
		}
		return nil
	}
}

// earlyEnough is how much clocks and timers may differ.
const earlyEnough = 100 * time.Millisecond

// charge counts, in a transaction of its own, the attempt of an isolated message that is
// now alone. If the process ends, that message is at fault, not another one.
func (in *Inbox) charge(ctx context.Context, w *work) (outcome, error) {
	if !w.start.Unended || w.start.charged || w.start.beside {
		return outcomeHandled, nil
	}
	id := w.id
	// In half of the time that it is alone: counted later, it would stay counted.
	unended, err := bounded.Do(ctx, in.calls, isolatedFor/2, func(ctx context.Context) (int, error) { return in.store.Charge(ctx, id) })
	if err != nil {
		return claimFailed(ctx, err), fmt.Errorf("charge: %w", err)
	}
	if unended > in.cfg.Retry.Crashes {
		return outcomeCrashed, ErrCrashed
	}
	w.start.charged = true
	return outcomeHandled, nil
}

// recordEnd undoes what recordStart recorded. If it fails, the message counts once as one that
// crashed, and is handled alone, without harm.
func (in *Inbox) recordEnd(ctx context.Context, w *work) {
	if !w.start.Recorded {
		return
	}
	detached, cancel := in.detach(ctx)
	defer cancel()
	id, charged := w.id, w.start.charged
	_, err := ask(detached, in, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, in.store.RecordEnd(ctx, id, charged)
	})
	if err != nil {
		level, attrs := in.failing.records.Event(slog.LevelWarn, in.textOf(err))
		in.cfg.Logger.Log(ctx, level, "end of an attempt not recorded",
			append(attrs, "consumer", in.cfg.Consumer, "topic", in.topicOf(ctx), "message_id", w.id, "error", in.textOf(err))...)
		return
	}
	w.start = start{}
}
