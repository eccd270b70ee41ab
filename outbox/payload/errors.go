package payload

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// What Decode refuses for good: the same delivery fails again whenever it is
// tried. Put it aside, and look at who can write to the broker.
var (
	// ErrUnsigned means that a signature is required and the message has none.
	// Encode returns it when a signature is required and there is no current
	// key to make it with.
	ErrUnsigned = errors.New("the message is not signed")

	// ErrSignature means that the signature does not fit the message: something
	// of it was changed, it was made with another key of the same id, or it
	// covers less than it has to.
	ErrSignature = errors.New("the signature is wrong")

	// ErrUnencrypted means that encryption is required and the payload is not
	// encrypted. Encode returns it when encryption is required and there is no
	// current key for it.
	ErrUnencrypted = errors.New("the payload is not encrypted")

	// ErrCiphertext means that the payload cannot be decrypted with the key it
	// names: it or what it is bound to (id, topic, ordering key, encoding) was
	// changed, or the key is another one of the same id.
	ErrCiphertext = errors.New("the payload cannot be decrypted")

	// ErrEncoding means that this version does not know what was done to the
	// payload, or that the payload is not what its encoding says. If the
	// producer is newer, update the consumer and replay.
	ErrEncoding = errors.New("the encoding is not known or does not fit the payload")

	// ErrTooLarge means that the plain payload has more than Config.MaxSize
	// bytes, or would have. Encode returns it too.
	ErrTooLarge = errors.New("the payload is too large")

	// ErrClaim means that what is in the store under the name is not what the
	// message refers to, or that the reference is another message's.
	ErrClaim = errors.New("the stored payload is not the one that was claimed")

	// ErrTopic means that the message was published to another topic than it was
	// received from. If that is meant, by a pattern for example, set Config.Topic.
	ErrTopic = errors.New("the message was published to another topic")
)

// What may pass: the message can be decoded once its cause is gone.
var (
	// ErrUnknownKey means that the codec has no key of the id that the message
	// names: it is too new, or was removed too early. Add it, or wait for the
	// roll-out that does. A stranger can make ids up, so do not wait for ever.
	ErrUnknownKey = errors.New("the key is not known")

	// ErrStore means that the store failed, did not answer within
	// Config.StoreTimeout, or is not set. The error of the store is in the chain
	// and in the text. Encode returns it too, before any SQL was sent for the
	// message.
	ErrStore = errors.New("the store failed")
)

// ErrReserved is returned by Encode for a message whose metadata has an entry
// that belongs to the codec, as a message does that was received without being
// decoded and is sent on.
var ErrReserved = errors.New("the metadata has an entry that is reserved for the codec")

// DecodeError is what Decode returns: which message could not be decoded, and
// why. It matches one of the sentinels above, and holds nothing of payloads and
// keys.
type DecodeError struct {
	MessageID string // shortened
	Err       error
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("payload: decode message %s: %v", strconv.Quote(e.MessageID), e.Err)
}

// Unwrap returns the cause.
func (e *DecodeError) Unwrap() error { return e.Err }

// Permanent reports whether the same delivery will fail however often it is
// tried. If not, the reason is [ErrUnknownKey] or [ErrStore].
func (e *DecodeError) Permanent() bool {
	return !errors.Is(e.Err, ErrUnknownKey) && !errors.Is(e.Err, ErrStore)
}

// detailed adds to a sentinel what is known of the case.
func detailed(sentinel error, format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{sentinel}, args...)...)
}

// shorten makes foreign text fit for an error message: short, valid UTF-8.
func shorten(s string) string {
	const limit = 64
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}
