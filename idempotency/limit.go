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
	callers map[Caller]allowance
}

// allowance is how many claims a caller may make without being counted again.
type allowance struct {
	left  int
	until time.Time
}

const (
	allowanceTime = time.Second
	maxAllowances = 10_000 // callers; more than that are forgotten and counted again
)

func (l *limits) take(c Caller) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a, ok := l.callers[c]
	if !ok || a.left == 0 || time.Now().After(a.until) {
		return false
	}
	a.left--
	l.callers[c] = a
	return true
}

// grant lets the caller make a quarter of what it has left. The claim that asked
// is one of them.
func (l *limits) grant(c Caller, left int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.callers == nil || len(l.callers) >= maxAllowances {
		l.callers = map[Caller]allowance{}
	}
	l.callers[c] = allowance{left: left / 4, until: time.Now().Add(allowanceTime)}
}

// limit tells whether the caller may claim another key: run if so. A key that it
// has already is none.
func (e *Engine) limit(ctx context.Context, in *intent) (verdict, Record, error) {
	if e.limits.take(in.claim.Caller) {
		return run, Record{}, nil
	}
	began := time.Now()
	n, err := e.store.Outstanding(ctx, in.claim.Caller, e.cfg.MaxOutstanding)
	e.telemetry.latency(ctx, "outstanding", began, err)
	if err != nil {
		return storeFailed, Record{}, err
	}
	if n < e.cfg.MaxOutstanding {
		e.limits.grant(in.claim.Caller, e.cfg.MaxOutstanding-n)
		return run, Record{}, nil
	}
	record, found, err := e.store.Find(ctx, in.claim.ID)
	switch {
	case err != nil:
		return storeFailed, Record{}, err
	case !found:
		return tooMany, Record{}, nil
	}
	return e.judge(in, record), record, nil
}
