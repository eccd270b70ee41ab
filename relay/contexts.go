package relay

import (
	"context"
	"time"
)

// publishContexts gives publishes their contexts. One ends when the relay gives its lane up,
// because the lease could not be renewed or was lost, and at the latest after
// Config.PublishTimeout: so the deadline of a publish moves with the lease. It
// belongs to the worker's loop.
type publishContexts struct {
	parent  context.Context //nolint:containedctx // lives as long as the loop
	timeout time.Duration
	lanes   map[*lane]*laneContext
}

// laneContext is what publishes of one lane run under.
type laneContext struct {
	ctx     context.Context //nolint:containedctx // ends with the lane
	cancel  context.CancelFunc
	current context.Context //nolint:containedctx // of publishes that begin now
	until   time.Time
	cancels []context.CancelFunc
}

func newPublishContexts(parent context.Context, timeout time.Duration) *publishContexts {
	return &publishContexts{parent: parent, timeout: timeout, lanes: map[*lane]*laneContext{}}
}

// of returns the context of publishes that begin now, and its end. One serves the
// publishes of a short while, instead of a timer for each; it leaves them at least
// seven eighths of the time.
func (t *publishContexts) of(l *lane, now time.Time) (ctx context.Context, until time.Time) {
	const parts = 8
	p := t.lanes[l]
	if p == nil {
		p = &laneContext{}
		p.ctx, p.cancel = context.WithCancel(t.parent)
		t.lanes[l] = p
	}
	if p.until.Sub(now) > t.timeout-t.timeout/parts {
		return p.current, p.until
	}
	p.until = now.Add(t.timeout)
	var cancel context.CancelFunc
	p.current, cancel = context.WithDeadline(p.ctx, p.until)
	if p.cancels = append(p.cancels, cancel); len(p.cancels) > 2*parts {
		p.cancels[0]() // expired long ago
		p.cancels = p.cancels[1:]
	}
	return p.current, p.until
}

// endLapsed ends the contexts of lanes that were dropped or whose leases cannot be
// trusted any more.
func (t *publishContexts) endLapsed(e *engine, now time.Time) {
	for l, p := range t.lanes {
		if !e.live(l) || now.After(l.trusted) {
			p.end()
			delete(t.lanes, l)
		}
	}
}

func (t *publishContexts) end() {
	for _, p := range t.lanes {
		p.end()
	}
}

func (p *laneContext) end() {
	p.cancel()
	for _, cancel := range p.cancels {
		cancel()
	}
}
