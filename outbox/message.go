package outbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// What a row can hold. The first three are AMQP's short strings; metadata has to
// fit, with the rest of the headers, into one frame of 128 KiB.
const (
	maxTopic    = 255
	maxID       = 255
	maxKey      = 255
	maxMetadata = 64 << 10
)

// Ref is the identity of a row. The id alone is none: a server that lost its tail
// gives ids out again.
type Ref struct {
	Lane      int
	ID        int64
	MessageID string
	CreatedAt time.Time // by the database's clock, at the insert
}

// Row is a message in the outbox: one that the broker has not confirmed.
type Row struct {
	Ref
	Topic    string
	Key      string // empty for an unkeyed message
	Payload  []byte
	Metadata []byte // see DecodeMetadata
}

// newRow checks the message at position i and encodes it.
func (o *Outbox) newRow(i int, topic string, msg *message.Message) (Row, delay, error) {
	if msg == nil {
		return Row{}, delay{}, &MessageError{Index: i, Field: "message", Problem: "is nil"}
	}
	bad := func(field, problem string) (Row, delay, error) {
		return Row{}, delay{}, &MessageError{Index: i, MessageID: shorten(msg.UUID), Field: field, Problem: problem}
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
	if len(msg.Payload) > o.cfg.MaxPayload {
		return bad("payload", fmt.Sprintf("has %d bytes; at most %d are allowed (outbox.Config.MaxPayload); store it elsewhere and publish a reference", len(msg.Payload), o.cfg.MaxPayload))
	}
	wait, field, problem := delayOf(msg.Metadata)
	if problem != "" {
		return bad(field, problem)
	}
	kept, problem := forBroker(msg.Metadata)
	if problem != "" {
		return bad("metadata", problem)
	}
	metadata, problem := encodeMetadata(kept)
	if problem != "" {
		return bad("metadata", problem)
	}
	payload := []byte(msg.Payload)
	if payload == nil {
		payload = []byte{} // nil would be NULL
	}
	return Row{
		Ref:   Ref{Lane: Lane(key, msg.UUID), MessageID: msg.UUID},
		Topic: topic, Key: key, Payload: payload, Metadata: metadata,
	}, wait, nil
}

func checkText(s string, limit int, required bool) string {
	switch {
	case s == "" && required:
		return "is empty"
	case len(s) > limit:
		return fmt.Sprintf("has %d bytes; at most %d are allowed", len(s), limit)
	case strings.IndexByte(s, 0) >= 0:
		return "holds a NUL byte"
	case !utf8.ValidString(s):
		return "is not valid UTF-8"
	}
	return ""
}

// encodeMetadata returns a JSON object with sorted names, or no bytes for no
// metadata. It is stored as bytes, so what was published is what comes back.
func encodeMetadata(metadata message.Metadata) (encoded []byte, problem string) {
	if len(metadata) == 0 {
		return []byte{}, ""
	}
	for name, value := range metadata {
		if problem := checkText(name, maxMetadata, true); problem != "" {
			return nil, fmt.Sprintf("name %q %s", shorten(name), problem)
		}
		if problem := checkText(value, maxMetadata, false); problem != "" {
			return nil, fmt.Sprintf("value of %q %s", shorten(name), problem)
		}
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(map[string]string(metadata)); err != nil {
		return nil, err.Error()
	}
	encoded = bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
	if len(encoded) > maxMetadata {
		return nil, fmt.Sprintf("has %d bytes when encoded; at most %d are allowed", len(encoded), maxMetadata)
	}
	return encoded, ""
}

// DecodeMetadata decodes the metadata of a row.
func DecodeMetadata(encoded []byte) (message.Metadata, error) {
	metadata := message.Metadata{}
	if len(encoded) == 0 {
		return metadata, nil
	}
	if err := json.Unmarshal(encoded, (*map[string]string)(&metadata)); err != nil {
		return nil, fmt.Errorf("outbox: metadata of the row: %w", err)
	}
	return metadata, nil
}

// shorten makes foreign text fit for an error message: short, valid UTF-8.
func shorten(s string) string {
	const limit = 64
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}
