package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/dlqstore"
)

// giveUp records that a delivery has failed. It returns nil if the message has become a
// dead letter.
func (in *Inbox) giveUp(ctx context.Context, w *work, err error) error {
	p := policyOf(err)
	if in.cfg.DeadLetters == nil && in.cfg.Sequence == nil {
		switch {
		case p.after > 0:
			delayNack(ctx, p.after)
		case p.unavailable:
			delayNack(ctx, in.cfg.Retry.delay(nacksOf(ctx)+1))
		}
		return err
	}
	detached, cancel := in.detach(ctx)
	defer cancel()
	f := failure{text: in.textOf(err), unavailable: p.unavailable, again: func(r record) time.Duration { return in.cfg.Retry.again(p, r) }}
	f.key, f.seq = in.placeOf(w)
	id, begun := w.id, w.start
	rec, recErr := ask(detached, in, func(ctx context.Context) (record, error) {
		return in.store.recordFailure(ctx, id, begun, f)
	})
	if recErr != nil {
		delayNack(ctx, in.cfg.Retry.delay(1))
		return errors.Join(err, fmt.Errorf("record failure: %w", recErr))
	}
	w.start = start{}
	if in.cfg.DeadLetters == nil || !p.permanent && rec.failures < in.cfg.Retry.Deliveries && rec.unavailable < in.cfg.Retry.Unavailable {
		delayNack(ctx, rec.again)
		return err
	}
	reason := ReasonFailed
	switch {
	case p.permanent:
		reason = ReasonPermanent
	case p.unavailable:
		reason = ReasonUnavailable
	}
	letter := in.newLetter(ctx, w, w.id, reason, err)
	letter.Tries = rec.failures + rec.unavailable
	for _, e := range rec.errors {
		letter.Attempts = append(letter.Attempts, dlqstore.Attempt{At: e.At, Class: string(ReasonFailed), Error: e.Error})
	}
	return in.deadLetter(ctx, w, letter)
}

// putOff records that a message will be delivered again, and when; no attempt is used up.
func (in *Inbox) putOff(ctx context.Context, w *work, err error) error {
	detached, cancel := in.detach(ctx)
	defer cancel()
	wait := in.cfg.Retry.delay(nacksOf(ctx) + 1)
	f := failure{text: in.textOf(err), uncounted: true, again: func(record) time.Duration { return wait }}
	f.key, f.seq = in.placeOf(w)
	id, begun := w.id, w.start
	_, recErr := ask(detached, in, func(ctx context.Context) (record, error) { return in.store.recordFailure(ctx, id, begun, f) })
	delayNack(ctx, wait)
	if recErr != nil {
		return errors.Join(err, fmt.Errorf("record failure: %w", recErr))
	}
	w.start = start{}
	return err
}

// refuse makes a dead letter of a message that must not be handled. Without dead letters
// err is treated like any other error.
func (in *Inbox) refuse(ctx context.Context, w *work, reason Reason, err error) error {
	if in.cfg.DeadLetters == nil {
		return err
	}
	if reason.refused() {
		return in.refuseLetter(ctx, in.newLetter(ctx, w, in.nameOf(w), reason, err))
	}
	id := w.id
	if reason == ReasonNoMessageID {
		id = ""
	}
	return in.deadLetter(ctx, w, in.newLetter(ctx, w, id, reason, err))
}

func (in *Inbox) deadLetter(ctx context.Context, w *work, letter *dlqstore.Letter) error {
	detached, cancel := in.detach(ctx)
	defer cancel()
	added, err := in.bury(detached, letter, w)
	if err != nil {
		delayNack(ctx, in.cfg.Retry.delay(1))
		return fmt.Errorf("%s: %w", letter.Error, err)
	}
	if !added {
		in.telemetry.record(ctx, duplicate)
		in.logDuplicate(ctx, letter.MessageID)
		return nil
	}
	in.telemetry.record(ctx, deadLetter)
	in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "message became a dead letter", slog.String("consumer", in.cfg.Consumer),
		slog.String("topic", letter.Topic), slog.String("message_id", letter.MessageID), slog.String("reason", letter.Reason), slog.String("error", letter.Error))
	return nil
}
