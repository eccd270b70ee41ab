package demo

import (
	"context"
	"sync"
)

// gate lets a number of orders pass and holds the rest back. A relay that is to
// be killed with a message unconfirmed needs a message; so the orders that will
// give it one wait until the trap is set. The zero value is closed.
type gate struct {
	mu     sync.Mutex // guards what follows
	limit  int
	passed int
	opened chan struct{} // closed and replaced when limit rises; nil if nobody waits
}

func (g *gate) pass(ctx context.Context) error {
	for {
		opened := g.try()
		if opened == nil {
			return nil
		}
		select {
		case <-opened:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// try returns nil if the caller may pass, else what to wait for.
func (g *gate) try() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.passed < g.limit {
		g.passed++
		return nil
	}
	if g.opened == nil {
		g.opened = make(chan struct{})
	}
	return g.opened
}

// open raises the number of orders that may pass to limit.
func (g *gate) open(limit int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit = limit
	if g.opened != nil {
		close(g.opened)
		g.opened = nil
	}
}
