package payload

import (
	"context"
	"crypto/cipher"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/text"
)

// Codec encodes and decodes payloads. It is safe for concurrent use, and holds no connection
// and no goroutine.
type Codec struct {
	compressFrom      int
	encryption        ring[cipher.AEAD]
	requireEncryption bool
	store             Store
	storeFrom         int
	storeTimeout      time.Duration
	signature         ring[*signer]
	requireSignature  bool
	signedMetadata    []string
	topic             func(subscribed, published string) bool
	maxSize           int

	writers, readers sync.Pool // *gzip.Writer, *gzip.Reader: up to a megabyte each
}

// Format writes "payload.Codec". It never shows keys.
func (*Codec) Format(f fmt.State, _ rune) { fmt.Fprint(f, "payload.Codec") }

// binding identifies the message that a payload belongs to.
type binding struct{ id, topic, key string }

// Encode returns a copy of msg with an encoded payload, to be published to topic with the
// ordering key, or "" for none. It does not change msg; the copy may share the bytes of its
// payload. An outbox with a codec calls Encode; do not call it yourself then. A message that
// is encoded already is refused with [ErrReserved].
//
// ctx bounds the call of the Store for a large payload. Other errors are [ErrTooLarge],
// [ErrStore], and [ErrUnencrypted] or [ErrUnsigned] if the codec has no current key for what
// it requires.
func (c *Codec) Encode(ctx context.Context, topic, key string, msg *message.Message) (*message.Message, error) {
	if err := c.checkPlain(msg); err != nil {
		return nil, fmt.Errorf("payload: encode: %w", err)
	}
	to := binding{id: msg.UUID, topic: topic, key: key}
	body, done, err := c.encode(ctx, to, msg.Payload)
	if err != nil {
		return nil, fmt.Errorf("payload: encode: %w", err)
	}
	out := msg.CopyWithContext()
	out.Payload = body
	if text := done.String(); text != "" {
		out.Metadata[EncodingMetadata] = text
	}
	if done.keyID != "" || done.claim != nil || c.signature.current != "" {
		out.Metadata[TopicMetadata] = topic
		out.Metadata[keyMetadata] = key
		if key == "" {
			delete(out.Metadata, keyMetadata)
		}
	}
	if c.signature.current != "" {
		out.Metadata[SignatureMetadata] = c.sign(to, out)
	}
	return out, nil
}

func (c *Codec) checkPlain(msg *message.Message) error {
	for _, name := range ownMetadata {
		if _, ok := msg.Metadata[name]; ok {
			return detailed(ErrReserved, "%s", name)
		}
	}
	switch {
	case len(msg.Payload) > c.maxSize:
		return detailed(ErrTooLarge, "it has %d bytes; at most %d are allowed (payload.Config.MaxSize)", len(msg.Payload), c.maxSize)
	case c.requireEncryption && c.encryption.current == "":
		return detailed(ErrUnencrypted, "encryption is required; set payload.Config.Encryption.Current")
	case c.requireSignature && c.signature.current == "":
		return detailed(ErrUnsigned, "a signature is required; set payload.Config.Signature.Current")
	}
	return nil
}

// encode performs the steps that change the payload.
func (c *Codec) encode(ctx context.Context, to binding, body []byte) ([]byte, encoding, error) {
	var done encoding
	if c.compressFrom > 0 && len(body) >= c.compressFrom {
		smaller, ok, err := c.compress(body)
		if err != nil {
			return nil, done, err
		}
		if ok {
			body, done.gzip = smaller, true
		}
	}
	if id := c.encryption.current; id != "" {
		done.keyID = id
		body = c.encryption.keys[id].Seal(nil, nil, body, done.additional(to))
	}
	if c.store != nil && len(body) >= c.storeFrom {
		claim := newClaim(to, body)
		if err := c.put(ctx, claim, body); err != nil {
			return nil, done, err
		}
		body, done.claim = []byte{}, claim
	}
	return body, done, nil
}

// Decode returns a copy of msg, with its context and the plain payload. Of the codec's
// metadata the copy keeps only the ordering key. Decode does not change msg. topic is the
// topic that msg was received from; if it is "", the topic is not checked. A message that was
// not encoded is copied unchanged, unless encryption or a signature is required.
//
// ctx bounds the call of the Store. The error is a [*DecodeError].
func (c *Codec) Decode(ctx context.Context, topic string, msg *message.Message) (*message.Message, error) {
	body, err := c.decode(ctx, topic, msg)
	if err != nil {
		return nil, &DecodeError{MessageID: text.Shorten(msg.UUID), Err: err}
	}
	out := msg.CopyWithContext()
	out.Payload = body
	for _, name := range ownMetadata {
		delete(out.Metadata, name)
	}
	return out, nil
}

func (c *Codec) decode(ctx context.Context, topic string, msg *message.Message) ([]byte, error) {
	from := binding{id: msg.UUID, topic: msg.Metadata.Get(TopicMetadata), key: msg.Metadata.Get(keyMetadata)}
	// First, so that an untrusted message costs nothing else.
	if err := c.verify(from, msg); err != nil {
		return nil, err
	}
	if topic != "" && from.topic != "" {
		accepted := false
		if err := nopanic.Call(func() error { accepted = c.topic(topic, from.topic); return nil }); err != nil {
			return nil, fmt.Errorf("%w: payload.Config.Topic %w", ErrTopic, err)
		}
		if !accepted {
			return nil, detailed(ErrTopic, "it was received from %q and published to %q", text.Shorten(topic), text.Shorten(from.topic))
		}
	}
	done, err := parseEncoding(msg.Metadata.Get(EncodingMetadata))
	if err != nil {
		return nil, err
	}
	if c.requireEncryption && done.keyID == "" {
		return nil, ErrUnencrypted
	}
	body := []byte(msg.Payload)
	if done.claim != nil {
		if len(body) > 0 {
			return nil, detailed(ErrEncoding, "a claimed message has a payload of its own")
		}
		if body, err = c.get(ctx, from, done); err != nil {
			return nil, err
		}
	}
	if done.keyID != "" {
		key, err := c.encryption.find(done.keyID)
		if err != nil {
			return nil, err
		}
		// The cause is omitted: it is always the same and adds nothing.
		if body, err = key.Open(nil, nil, body, done.additional(from)); err != nil {
			return nil, detailed(ErrCiphertext, "key %q", done.keyID)
		}
	}
	if done.gzip {
		return c.decompress(body)
	}
	return body, nil
}
