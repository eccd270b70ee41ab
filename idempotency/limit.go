package idempotency

import (
	"context"
	"sync"
	"time"
)

// limits knows which callers are far from their limit, so that not every claim has
// to count.
type limits struct {
	mu      sync.Mutex
	callers map[Caller]*allowance
}

// allowance is how many claims a caller may make without being counted again.
type allowance struct {
	turn chan struct{} // held by who counts, or takes

	left  int
	until time.Time
}

const (
	allowanceTime = time.Second
	maxAllowances = 10_000 // callers; when there are more all are forgotten, and counted again
)

func (l *limits) of(c Caller) *allowance {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.callers[c]
	if a == nil {
		if l.callers == nil || len(l.callers) >= maxAllowances {
			l.callers = map[Caller]*allowance{}
		}
		a = &allowance{turn: make(chan struct{}, 1)}
		l.callers[c] = a
	}
	return a
}

// limit tells whether the caller may claim another key: run if so. A key that it
// has already is none. Of the claims of one caller one counts, and the others
// wait for it: if all counted at once, all would find room.
func (e *Engine) limit(ctx context.Context, in *intent) (verdict, Record, error) {
	a := e.limits.of(in.claim.Caller)
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-ctx.Done():
		return storeFailed, Record{}, ctx.Err()
	}
	if a.left > 0 && time.Now().Before(a.until) {
		a.left--
		return run, Record{}, nil
	}
	began := time.Now()
	n, err := e.store.Outstanding(ctx, in.claim.Caller, e.cfg.MaxOutstanding)
	e.telemetry.latency(ctx, "outstanding", began, err)
	if err != nil {
		return storeFailed, Record{}, err
	}
	if n < e.cfg.MaxOutstanding {
		// The claim that asked is one of them.
		a.left, a.until = (e.cfg.MaxOutstanding-n)/4, time.Now().Add(allowanceTime)
		return run, Record{}, nil
	}
	record, found, err := e.store.Find(ctx, in.claim.ID)
	switch {
	case err != nil:
		return storeFailed, Record{}, err
	case !found:
		return tooMany, Record{}, nil
	}
	// A key whose owner died is counted already: it may be taken over.
	return e.judge(in, record), record, nil
}
