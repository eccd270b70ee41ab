package payload

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"strconv"
)

// Store keeps large payloads outside of messages, in object storage for example.
// It is used by many goroutines at once.
//
// Names are 97 characters of 0-9, a-f and one hyphen, made of the message's id,
// topic and key and of the bytes themselves: whatever is put under a name twice
// is the same. So a transaction that is tried again overwrites its object with
// itself, and an attempt that fails after all spoils no other's. With encryption
// each attempt has other bytes, and so an object of its own.
//
// An object is put before its transaction commits. Rolled back, it is an orphan.
// Nothing here ever deletes: have the store delete by age (a lifecycle rule),
// after the longest time that a message may spend in the outbox, a queue, the
// history and the dead letters together.
type Store interface {
	// Put stores body under name before it returns, also where there is an
	// object of that name. It does not change body nor keep it.
	Put(ctx context.Context, name string, body []byte) error

	// Get returns what was put under name. The reader is closed.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
}

// claim refers to a stored payload.
type claim struct {
	place [16]byte          // of the message that it belongs to
	sum   [sha256.Size]byte // of the bytes
	size  int
}

func newClaim(b binding, body []byte) *claim {
	return &claim{place: b.place(), sum: sha256.Sum256(body), size: len(body)}
}

// place is where the objects of a message are.
func (b binding) place() [16]byte {
	sum := sha256.Sum256(frame("oncemill/payload/claim/1", b.id, b.topic, b.key))
	return [16]byte(sum[:16])
}

func (c *claim) name() string {
	return hex.EncodeToString(c.place[:]) + "-" + hex.EncodeToString(c.sum[:])
}

func (c *claim) String() string { return c.name() + ":" + strconv.Itoa(c.size) }

func (c *Codec) put(ctx context.Context, to *claim, body []byte) error {
	ctx, cancel := context.WithTimeout(ctx, c.storeTimeout)
	defer cancel()
	if err := c.store.Put(ctx, to.name(), body); err != nil {
		return fmt.Errorf("%w: put %s: %w", ErrStore, to.name(), err)
	}
	return nil
}

// sealing is how many bytes encryption adds: a nonce and a tag.
const sealing = 12 + 16

func (c *Codec) get(ctx context.Context, b binding, done encoding) ([]byte, error) {
	from, most := done.claim, c.maxSize
	if done.keyID != "" {
		most += sealing
	}
	switch {
	case from.place != b.place():
		return nil, detailed(ErrClaim, "%s belongs to another message", from.name())
	case from.size > most:
		return nil, detailed(ErrTooLarge, "%s has %d bytes; at most %d are allowed (payload.Config.MaxSize)", from.name(), from.size, most)
	case c.store == nil:
		return nil, detailed(ErrStore, "%s is in a store, and payload.Config.Store is not set", from.name())
	}
	ctx, cancel := context.WithTimeout(ctx, c.storeTimeout)
	defer cancel()
	r, err := c.store.Get(ctx, from.name())
	if err != nil {
		return nil, fmt.Errorf("%w: get %s: %w", ErrStore, from.name(), err)
	}
	defer r.Close() //nolint:errcheck // all that counts has been read and is compared
	// The size is a stranger's word, so memory is taken as bytes come.
	var body bytes.Buffer
	body.Grow(min(from.size, 1<<20) + bytes.MinRead)
	if _, err := body.ReadFrom(io.LimitReader(r, int64(from.size)+1)); err != nil {
		return nil, fmt.Errorf("%w: get %s: %w", ErrStore, from.name(), err)
	}
	if body.Len() != from.size || sha256.Sum256(body.Bytes()) != from.sum {
		return nil, detailed(ErrClaim, "%s", from.name())
	}
	return body.Bytes(), nil
}
