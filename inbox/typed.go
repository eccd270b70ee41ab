package inbox

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
)

// Codec reads the payload of a message into a value. It must be safe for concurrent use.
// See [JSON] and [CodecFunc]; the marshalers of Watermill's cqrs package are codecs too.
type Codec interface {
	Unmarshal(msg *message.Message, v any) error
}

// CodecFunc is a function that implements Codec.
type CodecFunc func(msg *message.Message, v any) error

// Unmarshal calls f.
func (f CodecFunc) Unmarshal(msg *message.Message, v any) error { return f(msg, v) }

// JSON is the Codec for payloads in JSON (RFC 8259), as encoding/json reads it.
var JSON Codec = CodecFunc(func(msg *message.Message, v any) error { return json.Unmarshal(msg.Payload, v) })

// Handle makes a message handler of a function that takes the decoded payload and the
// transaction for its effects:
//
//	router.AddHandler("reserve", "orders", subscriber, "reservations", box.ContextPublisher(),
//		inbox.Handle(inbox.JSON, reserve)).AddMiddleware(in.Middleware)
//
//	func reserve(ctx context.Context, tx oncemill.Tx, order Order) ([]*message.Message, error)
//
// The context is that of the message; see [MessageFromContext] and [AttemptFromContext].
// Returned messages and errors are treated like those of any handler. If the codec cannot
// read a payload, the error is a [Permanent] [*PayloadError]. Without the middleware the
// handler fails with [ErrNoInbox].
func Handle[T any](codec Codec, handler func(ctx context.Context, tx oncemill.Tx, value T) ([]*message.Message, error)) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		tx, ok := TxFromContext(ctx)
		if !ok {
			return nil, ErrNoInbox
		}
		value, err := Decode[T](codec, msg)
		if err != nil {
			return nil, err
		}
		return handler(ctx, tx, value)
	}
}

// Decode reads the payload of a message. It fails with the same error as [Handle].
func Decode[T any](codec Codec, msg *message.Message) (value T, err error) {
	if err := codec.Unmarshal(msg, &value); err != nil {
		return value, Permanent(&PayloadError{Type: fmt.Sprintf("%T", value), Err: err})
	}
	return value, nil
}
