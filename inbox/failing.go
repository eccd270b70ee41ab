package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/inboxstore"
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
			delayNack(ctx, in.delay(nacksOf(ctx)+1))
		}
		return err
	}
	detached, cancel := in.detach(ctx)
	defer cancel()
	rec, recErr := in.recordFailure(detached, w, inboxstore.Failure{
		Text: in.textOf(err), Unavailable: p.unavailable,
		Again: func(r inboxstore.Record) time.Duration { return in.again(p, r) },
	})
	if recErr != nil {
		delayNack(ctx, in.delay(1))
		return errors.Join(err, recErr)
	}
	if in.cfg.DeadLetters == nil || !p.permanent && rec.Failures < in.cfg.Retry.Deliveries && rec.Unavailable < in.cfg.Retry.Unavailable {
		delayNack(ctx, rec.Again)
		in.logFailing(ctx, w, p, rec)
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
	letter.Tries = rec.Failures + rec.Unavailable
	for _, e := range rec.Errors {
		letter.Attempts = append(letter.Attempts, dlqstore.Attempt{At: e.At, Class: string(ReasonFailed), Error: e.Error})
	}
	return in.deadLetter(ctx, w, letter)
}

// logFailing logs when a message comes again, and after how many deliveries it is given up.
// The router logs the error.
func (in *Inbox) logFailing(ctx context.Context, w *work, p policy, rec inboxstore.Record) {
	if in.cfg.DeadLetters == nil {
		return // it is never given up
	}
	failed, atMost := rec.Failures, in.cfg.Retry.Deliveries
	if p.unavailable {
		failed, atMost = rec.Unavailable, in.cfg.Retry.Unavailable
	}
	in.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "message failed; it will be delivered again", slog.String("consumer", in.cfg.Consumer),
		slog.String("topic", in.topicOf(ctx)), slog.String("message_id", w.id), slog.String("key", shown(in.keyOf(w.msg))), slog.Int("failed_deliveries", failed),
		slog.Int("dead_letter_after", atMost), slog.Duration("next_in", rec.Again.Round(time.Millisecond)))
}

// putOff records that a message will be delivered again, and when; no attempt is used up.
func (in *Inbox) putOff(ctx context.Context, w *work, err error) error {
	detached, cancel := in.detach(ctx)
	defer cancel()
	wait := in.delay(nacksOf(ctx) + 1)
	_, recErr := in.recordFailure(detached, w, inboxstore.Failure{
		Text: in.textOf(err), Uncounted: true,
		Again: func(inboxstore.Record) time.Duration { return wait },
	})
	delayNack(ctx, wait)
	if recErr != nil {
		return errors.Join(err, recErr)
	}
	return err
}

// recordFailure records f for a message, and ends its start.
func (in *Inbox) recordFailure(ctx context.Context, w *work, f inboxstore.Failure) (inboxstore.Record, error) {
	f.Text = textOf(f.Text)
	f.Key, f.Seq = in.positionOf(w)
	f.Recorded, f.Charged = w.start.Recorded, w.start.charged
	id := w.id
	rec, err := ask(ctx, in, func(ctx context.Context) (inboxstore.Record, error) { return in.store.RecordFailure(ctx, id, f) })
	if err != nil {
		return rec, fmt.Errorf("record failure: %w", err)
	}
	w.start = start{}
	return rec, nil
}

// refuse makes a dead letter of a message that must not be handled. Without dead letters
// err is treated like any other error.
func (in *Inbox) refuse(ctx context.Context, w *work, reason Reason, err error) error {
	if in.cfg.DeadLetters == nil {
		return err
	}
	if reason.refused() {
		return in.refuseLetter(ctx, w, in.newLetter(ctx, w, in.nameOf(w), reason, err))
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
	added, err := in.writeDeadLetter(detached, letter, w)
	if err != nil {
		delayNack(ctx, in.delay(1))
		return fmt.Errorf("%s: %w", letter.Error, err)
	}
	if !added {
		in.telemetry.record(ctx, w, outcomeDuplicate)
		in.logDuplicate(ctx, letter.MessageID)
		return nil
	}
	in.telemetry.record(ctx, w, outcomeDeadLetter)
	level, attrs := in.failing.letters.Event(slog.LevelWarn, letter.Reason+" "+letter.Topic)
	in.cfg.Logger.Log(ctx, level, "message dead-lettered", append(attrs, "consumer", in.cfg.Consumer, "topic", letter.Topic,
		"message_id", letter.MessageID, "key", shown(letter.Key), "reason", letter.Reason, "error", letter.Error)...)
	return nil
}
