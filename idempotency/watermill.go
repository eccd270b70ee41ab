package idempotency

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Watermill returns a Watermill middleware that runs a handler once for each message, as
// [Do] does. It returns the same messages for every copy, so that what the router failed
// to publish the first time is published then. They are stored up to 64 MiB
// ([ErrTooLarge]), regardless of Config.Responses.MaxSize. name is the name of the
// consumer. key returns the key of a message; nil uses its UUID.
//
// For handlers whose effects are in the database, prefer package inbox, which does the
// same at a lower cost. This middleware is for handlers that share their keys with HTTP,
// or whose effects are elsewhere. Each attempt gets a copy of the message with the
// original metadata and payload, whatever an earlier attempt did to its copy.
// Acknowledging is left to the router. On a [SQLStore] an attempt that died counts as one
// without effects, as in [Do], and runs again: effects elsewhere happen twice unless their
// receiver deduplicates.
func (e *Engine) Watermill(name string, key func(*message.Message) string) message.HandlerMiddleware {
	if key == nil {
		key = func(msg *message.Message) string { return msg.UUID }
	}
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			ctx := msg.Context()
			cmd := Command{Name: name, Key: key(msg), Payload: []byte(msg.Payload)}
			result, _, err := e.do(ctx, cmd, true, func(ctx context.Context) ([]byte, error) {
				produced, err := h(copyOf(ctx, msg))
				if err != nil {
					return nil, err
				}
				out := make([]producedMessage, len(produced))
				for i, p := range produced {
					out[i] = producedFrom(p)
				}
				return json.Marshal(out)
			})
			if err != nil {
				return nil, err
			}
			var produced []producedMessage
			if err := json.Unmarshal(result, &produced); err != nil {
				return nil, fmt.Errorf("%w: %w", ErrDecode, err)
			}
			messages := make([]*message.Message, len(produced))
			for i, p := range produced {
				messages[i] = p.message(ctx)
			}
			return messages, nil
		}
	}
}

// copyOf returns a copy that an attempt may change. The metadata and payload of msg stay
// as they are for the next attempt.
func copyOf(ctx context.Context, msg *message.Message) *message.Message {
	c := msg.Copy()
	c.Payload = bytes.Clone(msg.Payload)
	c.SetContext(ctx)
	return c
}

// producedMessage is the stored form of a message.
type producedMessage struct {
	UUID     string
	Metadata message.Metadata
	Payload  []byte

	// Binary replaces UUID and Metadata if they are not valid UTF-8, which JSON cannot
	// hold: the UUID, then the name and the value of each pair.
	Binary [][]byte `json:",omitempty"`
}

func producedFrom(msg *message.Message) producedMessage {
	binary := [][]byte{[]byte(msg.UUID)}
	valid := utf8.ValidString(msg.UUID)
	for name, value := range msg.Metadata {
		binary = append(binary, []byte(name), []byte(value))
		valid = valid && utf8.ValidString(name) && utf8.ValidString(value)
	}
	if valid {
		return producedMessage{UUID: msg.UUID, Metadata: msg.Metadata, Payload: msg.Payload}
	}
	return producedMessage{Binary: binary, Payload: msg.Payload}
}

func (p producedMessage) message(ctx context.Context) *message.Message {
	msg := message.NewMessageWithContext(ctx, p.UUID, p.Payload)
	if p.Metadata != nil {
		msg.Metadata = p.Metadata
	}
	if len(p.Binary) > 0 {
		msg.UUID = string(p.Binary[0])
		for pair := range slices.Chunk(p.Binary[1:], 2) {
			msg.Metadata.Set(string(pair[0]), string(pair[len(pair)-1]))
		}
	}
	return msg
}
