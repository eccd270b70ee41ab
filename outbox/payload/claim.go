package payload

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"strconv"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// Store keeps large payloads outside of messages, for example in object storage. It must be
// safe for concurrent use.
//
// A name has 97 characters: 0-9, a-f and one hyphen. It is derived from the message's id,
// topic and key, and from the bytes. So two objects of the same name are equal: a retried
// transaction overwrites its object with the same bytes, and a failed attempt damages no
// other. With encryption each attempt has different bytes, and so its own object.
//
// An object is stored before its transaction commits, so a rollback leaves an orphan. The
// codec deletes nothing. Let the store delete objects by age (a lifecycle rule), after the
// longest time that a message may spend in the outbox, a queue, the history and the dead
// letters together.
type Store interface {
	// Put stores body under name before it returns, also if the name exists. It must not
	// change or keep body.
	Put(ctx context.Context, name string, body []byte) error

	// Get returns the object of that name. The codec closes the reader.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
}

// claim refers to a stored payload.
type claim struct {
	place [16]byte          // identifies the message
	sum   [sha256.Size]byte // of the bytes
	size  int
}

func newClaim(b binding, body []byte) *claim {
	return &claim{place: b.place(), sum: sha256.Sum256(body), size: len(body)}
}

// place is the part of the name that the objects of a message share.
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
	if err := nopanic.Call(func() error { return c.store.Put(ctx, to.name(), body) }); err != nil {
		return fmt.Errorf("%w: put %s: %w", ErrStore, to.name(), err)
	}
	return nil
}

// sealing is the number of bytes that encryption adds: a nonce and a tag.
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
	// The size is untrusted, so memory is allocated as bytes arrive.
	var body bytes.Buffer
	body.Grow(min(from.size, 1<<20) + bytes.MinRead)
	err := nopanic.Call(func() error {
		r, err := c.store.Get(ctx, from.name())
		if err != nil {
			return err
		}
		defer r.Close() //nolint:errcheck // the digest of all bytes is compared
		_, err = body.ReadFrom(io.LimitReader(r, int64(from.size)+1))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%w: get %s: %w", ErrStore, from.name(), err)
	}
	if body.Len() != from.size || sha256.Sum256(body.Bytes()) != from.sum {
		return nil, detailed(ErrClaim, "%s", from.name())
	}
	return body.Bytes(), nil
}
