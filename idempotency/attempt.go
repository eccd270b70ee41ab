package idempotency

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"runtime/debug"
	"sync"
	"time"
)

type runKey struct{}

// current is what a handler can reach through its context.
type current struct {
	id ID

	mu         sync.Mutex
	resourceID string
}

func contextWithRun(ctx context.Context, id ID) (context.Context, *current) {
	c := &current{id: id}
	return context.WithValue(ctx, runKey{}, c), c
}

func (c *current) resource() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resourceID
}

// SetResourceID notes the id of what the request made. It is stored with the
// claim, for operators and for Config.Pointer. Without an idempotent request in
// ctx it does nothing.
func SetResourceID(ctx context.Context, id string) {
	if c, ok := ctx.Value(runKey{}).(*current); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.resourceID = id
	}
}

// DeriveUUID returns a UUID that is the same for every attempt of the request or
// command that ctx belongs to, and another for another name or key: the ids of the
// messages that the request publishes, or of the rows it makes. It does not reveal
// the key. Without one in ctx (Config.Optional) it is random.
func DeriveUUID(ctx context.Context, name string) string {
	var sum [sha256.Size]byte
	version := byte(8) // RFC 9562: of our own making
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

// panicked is what a handler panicked with. aborted tells that it ended its
// goroutine instead.
type panicked struct {
	value   any
	stack   []byte
	aborted bool
}

// running is a call in a goroutine of its own, which somebody waits for, whatever
// happens: nobody else gets the key while it runs.
type running struct {
	deadline time.Time
	done     chan *panicked // capacity 1
}

func invoke(deadline time.Time, fn func()) *running {
	r := &running{deadline: deadline, done: make(chan *panicked, 1)}
	go func() {
		p := &panicked{aborted: true}
		defer func() {
			if p != nil {
				if v := recover(); v != nil {
					p.value, p.stack, p.aborted = v, debug.Stack(), false
				}
			}
			r.done <- p
		}()
		fn()
		p = nil
	}()
	return r
}

// wait waits until fn has returned. late is called once if it still runs when the
// deadline passes, and renew every so often until it returns, unless it is nil.
func (r *running) wait(late func(), every time.Duration, renew func()) (p *panicked) {
	timer := time.NewTimer(time.Until(r.deadline))
	defer timer.Stop()
	var ticks <-chan time.Time
	if renew != nil {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		ticks = ticker.C
	}
	for {
		select {
		case p := <-r.done:
			return p
		case <-timer.C:
			late()
		case <-ticks:
			renew()
		}
	}
}

// waitFor waits for no longer than patience, and not beyond the deadline.
func (r *running) waitFor(patience time.Duration) (p *panicked, ended bool) {
	timer := time.NewTimer(min(patience, time.Until(r.deadline)))
	defer timer.Stop()
	select {
	case p := <-r.done:
		return p, true
	case <-timer.C:
		return nil, false
	}
}
