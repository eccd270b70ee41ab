package payload

import (
	"context"
	"crypto/cipher"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Codec encodes payloads and decodes them. It holds no connection and no
// goroutine; it may be used by many goroutines.
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

// Format writes "payload.Codec", and nothing of the keys.
func (*Codec) Format(f fmt.State, _ rune) { fmt.Fprint(f, "payload.Codec") }

// binding is what a payload belongs to.
type binding struct{ id, topic, key string }

// Encode returns a copy of msg with an encoded payload, to be published to topic
// under the ordering key, empty for none. msg itself is not changed; the copy may
// share the bytes of its payload. An outbox with a codec calls it, so its users do
// not. What was encoded before is refused with [ErrReserved].
//
// ctx bounds the storing of a large payload, before which nothing has been done.
// Other errors are [ErrTooLarge], [ErrStore], and [ErrUnencrypted] or
// [ErrUnsigned] if the codec has no current key for what it requires.
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
		return detailed(ErrUnencrypted, "it has to be, and payload.Config.Encryption.Current is empty")
	case c.requireSignature && c.signature.current == "":
		return detailed(ErrUnsigned, "it has to be, and payload.Config.Signature.Current is empty")
	}
	return nil
}

// encode takes the steps that change the payload.
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

// Decode returns a copy of msg, with its context, that has the plain payload and
// none of the codec's metadata but the ordering key. msg is not changed. topic is
// the one that msg was received from; empty, it is not compared with the one it
// was published to. A message without marks is copied as it is, unless more is
// required of it.
//
// ctx bounds the fetching of a stored payload. The error is a [*DecodeError].
func (c *Codec) Decode(ctx context.Context, topic string, msg *message.Message) (*message.Message, error) {
	body, err := c.decode(ctx, topic, msg)
	if err != nil {
		return nil, &DecodeError{MessageID: shorten(msg.UUID), Err: err}
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
	// First of all, so that nothing is done for a stranger.
	if err := c.verify(from, msg); err != nil {
		return nil, err
	}
	if topic != "" && from.topic != "" && !c.topic(topic, from.topic) {
		return nil, detailed(ErrTopic, "it was received from %q and published to %q", shorten(topic), shorten(from.topic))
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
		// The reason is left out: there is only one, and it says nothing.
		if body, err = key.Open(nil, nil, body, done.additional(from)); err != nil {
			return nil, detailed(ErrCiphertext, "key %q", done.keyID)
		}
	}
	if done.gzip {
		return c.decompress(body)
	}
	return body, nil
}
