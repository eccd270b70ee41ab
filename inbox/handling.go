package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// work is a message that is being handled.
type work struct {
	msg         *message.Message
	uuid        string
	wire        *wire // the message as it came, if it was decoded
	id          string
	handler     message.HandlerFunc
	fingerprint []byte
	replay      *replay // nil if it is none
	start       start   // what was recorded of it before
	before      [2]int  // failed deliveries: by itself, by what was unavailable
	tries       int     // failed attempts of this delivery
	skips       bool    // it has waited long enough for an earlier message of its sequence
	span        trace.Span
	last        outcome // of the latest attempt, or why there was none
	dead        bool    // it has become a dead letter
}

// wire is the part of a message that the codec changes.
type wire struct {
	payload  message.Payload
	metadata message.Metadata
}

// came returns the message before decoding.
func (w *work) came() wire {
	if w.wire != nil {
		return *w.wire
	}
	return wire{w.msg.Payload, w.msg.Metadata}
}

// attempt is one try to handle a message.
type attempt func(ctx context.Context, w *work) (outcome, error)

func (in *Inbox) middleware(h message.HandlerFunc, try attempt) message.HandlerFunc {
	return func(msg *message.Message) (_ []*message.Message, err error) {
		returned := false
		defer func() {
			if !returned { // a handler has ended this goroutine: nobody else answers
				msg.Nack()
			}
		}()
		err = in.handle(msg.Context(), msg, h, try)
		returned = true
		// The messages that h returned are in the outbox: the router has nothing to publish.
		return nil, err
	}
}

// handle handles one delivery. No claim of the message is trusted before it is verified
// and decoded. Until then it has no id, and leaves no record under one that may be
// another's.
func (in *Inbox) handle(ctx context.Context, msg *message.Message, h message.HandlerFunc, try attempt) error {
	if err := in.awaitResumed(ctx); err != nil {
		return err
	}
	w := &work{msg: msg, uuid: msg.UUID, handler: h}
	began := time.Now()
	ctx = in.tracing.begin(ctx, w, in.topicOf(ctx))
	ended := errGoexit // if a handler ends this goroutine
	defer func() {
		in.tracing.end(w, ended, in.textOf)
		in.telemetry.measure(ctx, w, began, ended)
		in.logHandled(ctx, w, began, ended)
	}()
	claimed, restore := takeMark(msg)
	defer restore()
	genuine, err := in.verify(ctx, w)
	switch {
	case !genuine:
	case in.cfg.Payload == nil:
		err = in.handleGenuine(ctx, w, claimed, try)
	default:
		err = in.decoded(ctx, w, func() error { return in.handleGenuine(ctx, w, claimed, try) })
	}
	ended = err
	return in.told(err)
}

// logHandled logs that the effects of a message were committed.
func (in *Inbox) logHandled(ctx context.Context, w *work, began time.Time, err error) {
	if err != nil || w.last != outcomeHandled || !in.cfg.Logger.Enabled(ctx, slog.LevelDebug) {
		return
	}
	in.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "message handled", slog.String("consumer", in.cfg.Consumer), slog.String("topic", in.topicOf(ctx)),
		slog.String("message_id", w.id), slog.String("key", shown(in.keyOf(w.msg))), slog.Duration("took", time.Since(began)))
}

// errGoexit is the end of a delivery whose handler has ended its goroutine.
var errGoexit = errors.New("the handler ended its goroutine")

// verify calls Config.Verify. A message that is not genuine is refused, and err is its end.
func (in *Inbox) verify(ctx context.Context, w *work) (genuine bool, err error) {
	if in.cfg.Verify == nil {
		return true, nil
	}
	err = nopanic.Call(func() error { return in.cfg.Verify(w.msg) })
	if err == nil {
		return true, nil
	}
	in.telemetry.record(ctx, w, outcomeUnverified)
	if in.undecided(ctx, err) {
		return false, err
	}
	return false, in.refuse(ctx, w, ReasonUnverified, fmt.Errorf("%w: %w", ErrUnverified, err))
}

// undecided reports whether Verify could not decide about the message, which is then to be
// delivered again.
func (in *Inbox) undecided(ctx context.Context, err error) bool {
	p := policyOf(err)
	switch {
	case p.after > 0:
		delayNack(ctx, p.after)
	case p.unavailable, ctx.Err() != nil:
		delayNack(ctx, in.delay(nacksOf(ctx)+1))
	default:
		return false
	}
	return true
}

// handleGenuine handles a message that is what its producer has sent, as far as that can
// be checked.
func (in *Inbox) handleGenuine(ctx context.Context, w *work, claimed *replayMark, try attempt) error {
	if claimed != nil {
		done, err := in.verifyReplay(ctx, w, *claimed)
		if done || err != nil {
			return err
		}
	}
	if err := in.identify(w); err != nil {
		in.telemetry.record(ctx, w, outcomeBadMessageID)
		return in.refuse(ctx, w, ReasonNoMessageID, err)
	}
	if w.msg.UUID == "" { // of a replay
		w.msg.UUID = w.id
		defer func() { w.msg.UUID = "" }()
	}
	if in.cfg.Fingerprint != nil {
		if err := nopanic.Call(func() error { w.fingerprint = in.cfg.Fingerprint(w.msg); return nil }); err != nil {
			in.telemetry.record(ctx, w, outcomeBadPayload)
			return in.giveUp(ctx, w, Permanent(err))
		}
	}
	if err := in.checkAge(ctx, w); err != nil {
		if !errors.Is(err, ErrTooOld) {
			return err
		}
		in.telemetry.record(ctx, w, outcomeTooOld)
		return in.refuse(ctx, w, ReasonTooOld, err)
	}
	if in.early(w) {
		in.telemetry.record(ctx, w, outcomeWaiting)
		in.comeAfter(ctx, w)
		return ErrGap
	}
	if err := in.recordStart(ctx, w); err != nil {
		return err
	}
	return in.try(ctx, w, try)
}

// identify sets the id of a message. A replay has that of its dead letter.
func (in *Inbox) identify(w *work) error {
	if w.replay != nil {
		return nil
	}
	return nopanic.Call(func() error {
		w.id = in.cfg.ID(w.msg)
		return checkMessageID(w.id)
	})
}

func (in *Inbox) ping(ctx context.Context) error {
	_, err := ask(ctx, in, func(ctx context.Context) (struct{}, error) { return struct{}{}, in.store.Ping(ctx) })
	return err
}

// detach returns a context for writes that must happen even if the message's context has
// ended.
func (in *Inbox) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), callLimit)
}

// yield asks the subscriber to let the rest of the key pass.
func yield(ctx context.Context) {
	if delivery, ok := DeliveryFromContext(ctx); ok {
		delivery.Yield()
	}
}

// delayNack asks the subscriber, if it can, for a delayed redelivery.
func delayNack(ctx context.Context, d time.Duration) {
	if delivery, ok := DeliveryFromContext(ctx); ok {
		delivery.DelayNack(d)
	}
}

// nacksOf returns how often this process has nacked the delivery before.
func nacksOf(ctx context.Context) int {
	if delivery, ok := DeliveryFromContext(ctx); ok {
		return delivery.Nacks()
	}
	return 0
}

// cameBefore reports whether this is known not to be the first delivery.
func cameBefore(ctx context.Context) bool {
	delivery, ok := DeliveryFromContext(ctx)
	return ok && (delivery.Redelivered() || delivery.Nacks() > 0)
}

// topicOf returns the topic that the message was subscribed to, if known.
func (in *Inbox) topicOf(ctx context.Context) string {
	if topic := message.SubscribeTopicFromCtx(ctx); topic != "" {
		return topic
	}
	if d, ok := DeliveryFromContext(ctx); ok {
		if from, ok := d.(interface{ Topic() string }); ok {
			return from.Topic()
		}
	}
	return ""
}
