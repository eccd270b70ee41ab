package idempotency

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
)

type runKey struct{}

// current is the state of one attempt, which a handler reaches through its context.
type current struct {
	id            ID
	request       bool // else a command
	transactional bool

	mu         sync.Mutex
	resourceID string
	noEffect   bool
}

func (c *current) resource() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resourceID
}

func (c *current) hadNoEffect() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.noEffect
}

// SetResourceID records the id of what the request created. It is stored with the claim,
// for operators and for Config.Responses.Pointer. Without an idempotent request in ctx it does
// nothing.
func SetResourceID(ctx context.Context, id string) {
	if c, ok := ctx.Value(runKey{}).(*current); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.resourceID = id
	}
}

// NoEffect declares that this attempt has had no effect and will have none, so that its
// failure releases the key: a panic, a 5xx, an error of a command, a timeout. Without it
// the outcome of such a failure is unknown if effects are outside the transaction; see
// Config.Failures.Crashed. Call it once the handler knows, for example when it could not
// connect to the payment provider. It does not change an answer below 400, which is
// stored, nor an attempt in a transaction, which is rolled back. Without an idempotent
// request or command in ctx it does nothing.
func NoEffect(ctx context.Context) {
	if c, ok := ctx.Value(runKey{}).(*current); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.noEffect = true
	}
}

// DeriveUUID returns a UUID that is the same for every attempt of the request or command
// that ctx belongs to, and differs by name and key. Use it where effects are outside the
// transaction (Middleware): as the idempotency key of a call to another service, or as the
// id of a message that is published elsewhere. It does not reveal the key. Without a
// request or command in ctx (Config.Keys.Optional) it is random.
//
// It depends on nothing else. A key that runs again after its retention gets the same
// UUIDs, and whoever still knows them takes the new run for a copy: an inbox drops its
// messages. So give messages and rows of a transaction random ids, or set
// Config.Expiry.RefuseFor to the longest time that anybody knows an id.
func DeriveUUID(ctx context.Context, name string) string {
	var sum [sha256.Size]byte
	version := byte(8) // RFC 9562: custom
	if c, ok := ctx.Value(runKey{}).(*current); ok {
		copy(sum[:], framed(sha256.New(), []byte("oncemill derived uuid"), c.id[:], []byte(name)))
	} else {
		version = 4
		rand.Read(sum[:])
	}
	sum[6] = sum[6]&0x0f | version<<4
	sum[8] = sum[8]&0x3f | 0x80
	s := hex.EncodeToString(sum[:16])
	return fmt.Sprintf("%s-%s-%s-%s-%s", s[:8], s[8:12], s[12:16], s[16:20], s[20:])
}
