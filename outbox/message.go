package outbox

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// What a row can hold. The first three are limits of AMQP short strings. Metadata has
// to fit into one frame of 128 KiB, together with the other headers.
const (
	maxTopic    = 255
	maxID       = 255
	maxKey      = 255
	maxMetadata = 64 << 10
)

// Ref is the identity of a row. The id alone is not enough: a server that lost its
// latest commits gives ids out again.
type Ref struct {
	Lane      int
	ID        int64
	MessageID string
	CreatedAt time.Time // by the database's clock, at the insert
	Place     Place     // not part of the identity
}

// Place is the physical location of a row when it was read. It makes the removal of
// many rows cheaper. A wrong or missing place does no harm there. A row that was
// changed has a new place. SQLite has none.
type Place struct {
	block uint32 // of the partition
	item  uint16 // in the block; 0 for no place
}

// PlaceOf returns the place for a ctid in the binary form of tidsend.
func PlaceOf(tid []byte) Place {
	if len(tid) != placeWidth {
		return Place{}
	}
	return Place{block: binary.BigEndian.Uint32(tid), item: binary.BigEndian.Uint16(tid[4:])}
}

const placeWidth = 6

// String returns the place as a tid of PostgreSQL.
func (p Place) String() string { return fmt.Sprintf("(%d,%d)", p.block, p.item) }

// Row is a message in the outbox: one that the broker has not confirmed.
type Row struct {
	Ref
	Topic    string
	Key      string // empty for an unkeyed message
	Payload  []byte
	Metadata []byte // see DecodeMetadata

	// Hollow reports that payload and metadata were not read; see ReadRequest.Hollow.
	Hollow bool

	// Missing is the length of the payload if it was too long to be read; see
	// [Queue.ReadPiece]. 0: it was read.
	Missing int
}

// Known returns what identifies the row to a reader that holds it.
func (r Ref) Known() Known { return Known{ID: r.ID, CreatedAt: r.CreatedAt} }

// newRow checks the message at position i and returns its row, without the parts that
// Config.Payload has yet to encode, and its delay if it is scheduled.
func (o *Outbox) newRow(of tracer, i int, topic string, msg *message.Message) (Row, delay, error) {
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
	wait, field, problem := delayOf(msg.Metadata)
	if problem != "" {
		return bad(field, problem)
	}
	row := Row{Ref: Ref{Lane: Lane(key, msg.UUID), MessageID: msg.UUID}, Topic: topic, Key: key}
	if o.cfg.Payload != nil {
		return row, wait, nil
	}
	row, err := o.fill(of(msg), row, i, msg)
	return row, wait, err
}

// fill adds the parts of the message that are stored unchanged, and the trace of ctx.
func (o *Outbox) fill(ctx context.Context, row Row, i int, msg *message.Message) (Row, error) {
	bad := func(field, problem string) (Row, error) {
		return Row{}, &MessageError{Index: i, MessageID: shorten(msg.UUID), Field: field, Problem: problem}
	}
	if len(msg.Payload) > o.cfg.MaxPayload {
		return bad("payload", fmt.Sprintf("has %d bytes; at most %d are allowed (outbox.Config.MaxPayload); store it elsewhere and publish a reference", len(msg.Payload), o.cfg.MaxPayload))
	}
	kept, problem := forBroker(msg.Metadata)
	if problem != "" {
		return bad("metadata", problem)
	}
	metadata, problem := encodeMetadata(traced(ctx, o.cfg.Propagator, kept))
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
func (o *Outbox) encode(ctx context.Context, of tracer, rows []Row, messages []*message.Message) error {
	if o.cfg.Payload == nil {
		return nil
	}
	for i, msg := range messages {
		encoded, err := o.cfg.Payload.Encode(ctx, rows[i].Topic, rows[i].Key, msg)
		if err != nil {
			return fmt.Errorf("outbox: message %d (id %q): %w", i, shorten(msg.UUID), err)
		}
		if rows[i], err = o.fill(of(msg), rows[i], i, encoded); err != nil { //nolint:contextcheck // only for the trace
			return err
		}
	}
	return nil
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

// encodeMetadata returns a JSON object with sorted names, or no bytes for no metadata.
// It is stored as bytes, so exactly what was published comes back.
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
	if metadata, ok := decodePlain(string(encoded)); ok {
		return metadata, nil
	}
	metadata := message.Metadata{}
	if err := json.Unmarshal(encoded, (*map[string]string)(&metadata)); err != nil {
		return nil, fmt.Errorf("outbox: metadata of the row: %w", err)
	}
	return metadata, nil
}

// decodePlain decodes an object of strings in our encoder's format that contains
// nothing to unescape. json.Unmarshal takes ten times as long, and decodes everything
// else.
func decodePlain(s string) (metadata message.Metadata, ok bool) {
	metadata = message.Metadata{}
	if s == "" {
		return metadata, true
	}
	rest, ok := strings.CutPrefix(s, `{"`)
	if !ok || !utf8.ValidString(rest) {
		return nil, false
	}
	for {
		name, after, found := strings.Cut(rest, `":"`)
		value, next, closed := strings.Cut(after, `"`)
		if !found || !closed || !plain(name) || !plain(value) {
			return nil, false
		}
		metadata[name] = value
		if next == "}" {
			return metadata, true
		}
		if rest, ok = strings.CutPrefix(next, `,"`); !ok {
			return nil, false
		}
	}
}

// plain reports whether s appears in JSON without escapes.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] == '"' || s[i] == '\\' {
			return false
		}
	}
	return true
}

// shorten makes foreign text suitable for an error message: short, valid UTF-8.
func shorten(s string) string {
	const limit = 64
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}
