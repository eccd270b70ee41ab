package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox/payload"
)

// decode gives msg its plain payload. What is outside of the inbox, a retry or a
// queue for poison, has the message as it came: restore gives it that back.
func (in *Inbox) decode(ctx context.Context, msg *message.Message) (restore func(), err error) {
	if in.cfg.Payload == nil {
		return func() {}, nil
	}
	plain, err := in.cfg.Payload.Decode(ctx, message.SubscribeTopicFromCtx(ctx), msg)
	if err != nil {
		return nil, fmt.Errorf("inbox: %w", err)
	}
	payload, metadata := msg.Payload, msg.Metadata
	msg.Payload, msg.Metadata = plain.Payload, plain.Metadata
	return func() { msg.Payload, msg.Metadata = payload, metadata }, nil
}

// decoded makes an attempt with the plain payload, which is got before the
// transaction begins: it may be in a store elsewhere.
func (in *Inbox) decoded(ctx context.Context, w *work, try attempt) (outcome, error) {
	restore, err := in.decode(ctx, w.msg)
	if err != nil {
		var broken *payload.DecodeError
		if errors.As(err, &broken) && broken.Permanent() {
			err = Permanent(err)
		}
		return badPayload, err
	}
	defer restore()
	if in.cfg.Fingerprint != nil && in.cfg.Payload != nil {
		w.fingerprint = in.cfg.Fingerprint(w.msg) // what it says, not how it came
	}
	return try(ctx, w)
}
