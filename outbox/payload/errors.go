package payload

import (
	"errors"
	"fmt"
	"strconv"
)

// Permanent errors of Decode: the same delivery fails each time. Dead-letter it, and check
// who can write to the broker.
var (
	// ErrUnsigned means that a signature is required and the message has none. Encode
	// returns it when a signature is required and there is no current key.
	ErrUnsigned = errors.New("the message is not signed")

	// ErrSignature means that the signature does not match the message: the message was
	// changed, another key has the same id, or the signature does not cover everything
	// that is required.
	ErrSignature = errors.New("the signature is wrong")

	// ErrUnencrypted means that encryption is required and the payload is not
	// encrypted. Encode returns it when encryption is required and there is no
	// current key for it.
	ErrUnencrypted = errors.New("the payload is not encrypted")

	// ErrCiphertext means that the payload cannot be decrypted with the key it names: the
	// payload, id, topic, ordering key or encoding was changed, or another key has the same
	// id.
	ErrCiphertext = errors.New("the payload cannot be decrypted")

	// ErrEncoding means that this version does not know the encoding, or that the payload
	// does not match it. If the producer is newer, update the consumer and replay.
	ErrEncoding = errors.New("the encoding is unknown or does not match the payload")

	// ErrTooLarge means that the plain payload is, or would be, larger than
	// Config.MaxSize. Encode returns it too.
	ErrTooLarge = errors.New("the payload is too large")

	// ErrClaim means that the stored object is not the one that the message refers to, or
	// that the reference belongs to another message.
	ErrClaim = errors.New("the stored payload is not the one that the message refers to")

	// ErrTopic means that the message was published to another topic than the one it was
	// received from, or that Config.Topic panicked. If that is intended, for example with
	// topic patterns, set Config.Topic.
	ErrTopic = errors.New("the message was published to another topic")
)

// Temporary errors of Decode: the message can be decoded once the cause is gone.
var (
	// ErrUnknownKey means that the codec has no key with the id in the message: the key is
	// too new, or was removed too early. Add it, or wait for the roll-out that does.
	// Anybody can invent ids, so do not wait forever.
	ErrUnknownKey = errors.New("the key is unknown")

	// ErrStore means that the store failed or panicked, did not answer within
	// Config.StoreTimeout, or is not set. The store's error is wrapped. Encode
	// returns it too, before any SQL for the message.
	ErrStore = errors.New("the store failed")
)

// ErrReserved is returned by Encode for a message with metadata that belongs to the codec,
// for example a message that was received without being decoded and is published again.
var ErrReserved = errors.New("the metadata has an entry that is reserved for the codec")

// DecodeError reports which message could not be decoded and why. It matches one of the
// errors above, and contains nothing of payloads and keys.
type DecodeError struct {
	MessageID string // shortened
	Err       error
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("payload: decode message %s: %v", strconv.Quote(e.MessageID), e.Err)
}

// Unwrap returns the cause.
func (e *DecodeError) Unwrap() error { return e.Err }

// Permanent reports whether the same delivery will fail each time. Otherwise the reason is
// [ErrUnknownKey] or [ErrStore].
func (e *DecodeError) Permanent() bool {
	return !errors.Is(e.Err, ErrUnknownKey) && !errors.Is(e.Err, ErrStore)
}

// detailed wraps a sentinel with details.
func detailed(sentinel error, format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{sentinel}, args...)...)
}
