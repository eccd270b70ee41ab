package outbox

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/text"
)

// What a row can hold. The first three are limits of AMQP short strings. Metadata has
// to fit into one frame of 128 KiB, together with the other headers.
const (
	maxTopic    = 255
	maxID       = 255
	maxKey      = 255
	maxMetadata = 64 << 10
)

// newRow checks the message at position i and returns its row, without the parts that
// Config.Payload has yet to encode, and its delay if it is scheduled.
func (o *Outbox) newRow(of tracer, i int, topic string, msg *message.Message) (outboxstore.Row, delay, error) {
	if msg == nil {
		return outboxstore.Row{}, delay{}, &MessageError{Index: i, Field: "message", Problem: "is nil"}
	}
	bad := func(field, problem string) (outboxstore.Row, delay, error) {
		return outboxstore.Row{}, delay{}, &MessageError{Index: i, MessageID: text.Shorten(msg.UUID), Field: field, Problem: problem}
	}
	if problem := checkText(topic, maxTopic, true); problem != "" {
		return bad("topic", problem)
	}
	if problem := checkText(msg.UUID, maxID, true); problem != "" {
		return bad("id", problem)
	}
	key := o.cfg.Key(msg)
	if problem := checkText(key, maxKey, false); problem != "" {
		return bad("key", problem)
	}
	wait, field, problem := delayOf(msg.Metadata)
	if problem != "" {
		return bad(field, problem)
	}
	row := outboxstore.Row{Ref: outboxstore.Ref{Lane: Lane(key, msg.UUID), MessageID: msg.UUID}, Topic: topic, Key: key}
	if o.cfg.Payload != nil {
		return row, wait, nil
	}
	row, err := o.fill(of(msg), row, i, msg)
	return row, wait, err
}

// fill adds the parts of the message that are stored unchanged, and the trace of ctx.
func (o *Outbox) fill(ctx context.Context, row outboxstore.Row, i int, msg *message.Message) (outboxstore.Row, error) {
	bad := func(field, problem string) (outboxstore.Row, error) {
		return outboxstore.Row{}, &MessageError{Index: i, MessageID: text.Shorten(msg.UUID), Field: field, Problem: problem}
	}
	if len(msg.Payload) > o.cfg.MaxPayload {
		return bad("payload", fmt.Sprintf("has %d bytes; at most %d are allowed (outbox.Config.MaxPayload); store it elsewhere and publish a reference", len(msg.Payload), o.cfg.MaxPayload))
	}
	kept, problem := forBroker(msg.Metadata)
	if problem != "" {
		return bad("metadata", problem)
	}
	metadata, problem := encodeMetadata(o.traces.Continue(ctx, kept))
	if problem != "" {
		return bad("metadata", problem)
	}
	row.Payload, row.Metadata = []byte(msg.Payload), metadata
	if row.Payload == nil {
		row.Payload = []byte{} // nil would be NULL
	}
	return row, nil
}

// encode fills rows with the output of Config.Payload. It works on copies, since the
// caller may publish a message again. It runs last, because it may put payloads into a
// store.
func (o *Outbox) encode(ctx context.Context, of tracer, rows []outboxstore.Row, messages []*message.Message) error {
	if o.cfg.Payload == nil {
		return nil
	}
	for i, msg := range messages {
		encoded, err := o.cfg.Payload.Encode(ctx, rows[i].Topic, rows[i].Key, msg)
		if err != nil {
			return fmt.Errorf("outbox: message %d (id %q): %w", i, text.Shorten(msg.UUID), err)
		}
		if rows[i], err = o.fill(of(msg), rows[i], i, encoded); err != nil { //nolint:contextcheck // only for the trace
			return err
		}
	}
	return nil
}

func checkText(s string, limit int, required bool) string {
	if s == "" && required {
		return "is empty"
	}
	return text.Check(s, limit)
}

// encodeMetadata returns a JSON object with sorted names, or no bytes for no metadata.
// It is stored as bytes, so exactly what was published comes back.
func encodeMetadata(metadata message.Metadata) (encoded []byte, problem string) {
	if len(metadata) == 0 {
		return []byte{}, ""
	}
	for name, value := range metadata {
		if problem := checkText(name, maxMetadata, true); problem != "" {
			return nil, fmt.Sprintf("name %q %s", text.Shorten(name), problem)
		}
		if problem := checkText(value, maxMetadata, false); problem != "" {
			return nil, fmt.Sprintf("value of %q %s", text.Shorten(name), problem)
		}
	}
	encoded, err := text.JSON(map[string]string(metadata))
	if err != nil {
		return nil, err.Error()
	}
	if len(encoded) > maxMetadata {
		return nil, fmt.Sprintf("has %d bytes when encoded; at most %d are allowed", len(encoded), maxMetadata)
	}
	return encoded, ""
}
