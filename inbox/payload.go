package inbox

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
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
