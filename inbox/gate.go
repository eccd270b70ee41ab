package inbox

import (
	"context"
	"sync"
	"time"
)

// gate keeps messages waiting during an outage. While it is closed one message at
// a time goes through to see whether the outage is over.
type gate struct {
	mu       sync.Mutex
	closed   bool
	until    time.Time // the next probe is not before
	failures int
	probing  bool
	changed  chan struct{} // closed, and replaced, on every change
}

const (
	firstProbe = 100 * time.Millisecond
	lastProbe  = 5 * time.Second
)

func newGate() *gate { return &gate{changed: make(chan struct{})} }

// enter waits until a message may be handled. probe means that it is the one
// whose fate decides; its result must be told to leave.
func (g *gate) enter(ctx context.Context) (probe bool, err error) {
	for {
		g.mu.Lock()
		if !g.closed {
			g.mu.Unlock()
			return false, nil
		}
		wait := time.Until(g.until)
		if wait <= 0 && !g.probing {
			g.probing = true
			g.mu.Unlock()
			return true, nil
		}
		if g.probing {
			wait = lastProbe // a change is told
		}
		changed := g.changed
		g.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false, ctx.Err()
		}
		timer.Stop()
	}
}

// leave tells how a message fared that was let through. It returns true if this
// is the beginning of an outage, or its end.
func (g *gate) leave(probe, outage bool) (turned bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if probe {
		g.probing = false
	} else if !outage || g.closed {
		return false
	}
	turned = g.closed != outage
	g.closed = outage
	if outage {
		g.failures++
		g.until = time.Now().Add(jitter(double(firstProbe, g.failures-1, lastProbe)))
	} else {
		g.failures = 0
	}
	close(g.changed)
	g.changed = make(chan struct{})
	return turned
}
