package idempotency

import (
	"context"
	"sync"
	"time"
)

// limits remembers which callers are far below their limit, so that not every claim has to
// count.
type limits struct {
	mu      sync.Mutex
	callers map[Caller]*allowance
}

// allowance is how many claims a caller may make before the next count.
type allowance struct {
	mu       sync.Mutex
	left     int
	until    time.Time
	counting *counting // nil: nobody counts
}

// counting is a claim that counts, while others of its caller wait for it.
type counting struct {
	done  chan struct{} // closed when it has counted
	since time.Time
}

const (
	allowanceTime = time.Second
	maxAllowances = 10_000 // callers; when there are more all are forgotten, and counted again

	// countPatience is how long claims wait for the one that counts: its connection may be
	// dead. Then another one counts, and they wait for that.
	countPatience = 100 * time.Millisecond
)

func (l *limits) of(c Caller) *allowance {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.callers[c]
	if a == nil {
		if l.callers == nil || len(l.callers) >= maxAllowances {
			l.callers = map[Caller]*allowance{}
		}
		a = &allowance{}
		l.callers[c] = a
	}
	return a
}

// take uses one of the remaining claims. If none remain, it returns the count to wait for
// (other), or the count that the caller must do (self).
func (a *allowance) take() (taken bool, other, self *counting) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	switch {
	case a.left > 0 && now.Before(a.until):
		a.left--
		return true, nil, nil
	case a.counting != nil && now.Sub(a.counting.since) < countPatience:
		return false, a.counting, nil
	}
	a.counting = &counting{done: make(chan struct{}), since: now}
	return false, nil, a.counting
}

// counted ends a count. The result is outdated if another count has replaced it meanwhile.
func (a *allowance) counted(self *counting, left int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(self.done)
	if a.counting == self {
		a.counting, a.left, a.until = nil, left, time.Now().Add(allowanceTime)
	}
}

// limit returns run if the caller may claim another key. A key that the caller already has
// is not counted as another. Of the claims of one caller one counts, and the others wait
// for it: if all counted at once, all would find room.
func (in *intent) limit(ctx context.Context) (verdict, Record, error) {
	a := in.limits.of(in.claim.Caller)
	for {
		taken, other, self := a.take()
		if taken {
			return run, Record{}, nil
		}
		if self != nil {
			return in.countOutstanding(ctx, a, self)
		}
		timer := time.NewTimer(time.Until(other.since.Add(countPatience)))
		select {
		case <-other.done:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return storeFailed, Record{}, ctx.Err()
		}
		timer.Stop()
	}
}

func (in *intent) countOutstanding(ctx context.Context, a *allowance, self *counting) (verdict, Record, error) {
	left := 0
	defer func() { a.counted(self, left) }()
	began := time.Now()
	n, err := in.store.Outstanding(ctx, in.claim.Caller, in.cfg.Keys.MaxOutstanding)
	in.telemetry.latency(ctx, "outstanding", began, err)
	if err != nil {
		return storeFailed, Record{}, err
	}
	if n < in.cfg.Keys.MaxOutstanding {
		left = (in.cfg.Keys.MaxOutstanding - n) / 4 // the claim that asked is one of them
		return run, Record{}, nil
	}
	record, found, err := in.store.Find(ctx, in.claim.ID)
	switch {
	case err != nil:
		return storeFailed, Record{}, err
	case !found:
		return tooMany, Record{}, nil
	}
	if v := in.judge(record); v != run {
		return v, record, nil
	}
	return tooMany, Record{}, nil // to take it over would make it one more
}
