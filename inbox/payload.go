package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Limits for payloads that grow when decoded: 65 KB from an untrusted sender may become
// payload.Config.MaxSize. A message without room waits without its decoded payload.
const (
	decodersAtMost = 4         // messages decoded at once
	plainAtMost    = 256 << 20 // bytes of decoded payloads in flight; a single one may have more
)

// decoded gives msg its plain payload while next runs, before any transaction, since the
// payload may be in a remote store. Outside the inbox, for example in a retry or a poison
// queue, the message is unchanged.
//
// A message that cannot be decoded is refused, since anybody may have made it. If the
// store has failed it is not refused: then its signature is good, if it needs one.
func (in *Inbox) decoded(ctx context.Context, w *work, next func() error) error {
	for attempts := 1; ; attempts++ {
		plain, err := in.decode(ctx, w.msg)
		if err == nil {
			return in.with(w, plain, next)
		}
		in.telemetry.record(ctx, w, outcomeBadPayload)
		var broken *payload.DecodeError
		switch {
		case !errors.As(err, &broken):
			return err
		case broken.Permanent():
			return in.refuse(ctx, w, refusal(err), err)
		case attempts < in.cfg.Retry.Tries && sleep.For(ctx, in.backoff(attempts)):
		case ctx.Err() != nil || in.cfg.DeadLetters == nil:
			return err
		case errors.Is(err, payload.ErrStore):
			if in.identify(w) != nil {
				return in.refuse(ctx, w, ReasonNoMessageID, err)
			}
			return in.giveUp(ctx, w, err)
		case nacksOf(ctx)+1 < in.cfg.Retry.Deliveries: // the key may be added
			delayNack(ctx, in.delay(nacksOf(ctx)+1))
			return err
		default:
			return in.refuse(ctx, w, refusal(err), err)
		}
	}
}

// refusal returns why a message was not decoded.
func refusal(err error) Reason {
	for _, changed := range []error{
		payload.ErrUnsigned, payload.ErrUnencrypted, payload.ErrSignature, payload.ErrCiphertext, payload.ErrTopic, payload.ErrUnknownKey,
	} {
		if errors.Is(err, changed) {
			return ReasonUnverified
		}
	}
	return ReasonMalformed
}

func (in *Inbox) decode(ctx context.Context, msg *message.Message) (*message.Message, error) {
	if err := in.decoders.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer in.decoders.Release(1)
	plain, err := in.cfg.Payload.Decode(ctx, message.SubscribeTopicFromCtx(ctx), msg)
	if err != nil {
		return nil, fmt.Errorf("inbox: %w", err)
	}
	// While it waits it keeps its decoder, so few payloads wait here.
	if err := in.plain.Acquire(ctx, plainSize(plain)); err != nil {
		return nil, err
	}
	return plain, nil
}

func plainSize(plain *message.Message) int64 { return min(int64(len(plain.Payload)), plainAtMost) }

// with runs next while the message has its plain payload.
func (in *Inbox) with(w *work, plain *message.Message, next func() error) error {
	defer in.plain.Release(plainSize(plain))
	msg := w.msg
	w.wire = &wire{msg.Payload, msg.Metadata}
	defer func() { msg.Payload, msg.Metadata, w.wire = w.wire.payload, w.wire.metadata, nil }()
	msg.Payload, msg.Metadata = plain.Payload, plain.Metadata
	return next()
}
