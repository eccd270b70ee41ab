package relay

import (
	"context"
	"time"
)

// publishContexts provides the contexts of publishes. A context ends when the relay
// gives up its lane, because the lease could not be renewed or was lost, and after
// Config.PublishTimeout at the latest. The deadline of a publish thus moves with the
// lease. It belongs to the worker's loop.
type publishContexts struct {
	parent  context.Context //nolint:containedctx // lives as long as the loop
	timeout time.Duration
	lanes   map[*lane]*laneContext
}

// laneContext is the context of publishes of one lane.
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

// of returns the context for publishes that begin now, and its end. Publishes of a
// short period share one, which avoids a timer for each. It leaves them at least seven
// eighths of the time.
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

// endLapsed ends the contexts of lanes that were dropped or whose leases can no longer
// be trusted.
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
