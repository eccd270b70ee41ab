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
	claiming int // claims that the store has not answered: a count may lack them
	until    time.Time
	counting *counting // nil: no claim counts
	known    time.Time // when a count was last used; one that began before is outdated
}

// counting is a claim that counts, while others of its caller wait for it.
type counting struct {
	done  chan struct{} // closed when it has counted
	since time.Time
}

// wait returns when the claim has counted, or could have. The error is that of ctx.
func (c *counting) wait(ctx context.Context) error {
	timer := time.NewTimer(time.Until(c.since.Add(countWait)))
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

const (
	allowanceTime = time.Second
	maxAllowances = 10_000 // callers; when there are more all are forgotten, and counted again

	// countWait is how long claims wait for the one that counts: its connection may be
	// dead. Then another one counts, and they wait for that.
	countWait = 100 * time.Millisecond
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
		a.claiming++
		return true, nil, nil
	case a.counting != nil && now.Sub(a.counting.since) < countWait:
		return false, a.counting, nil
	}
	a.counting = &counting{done: make(chan struct{}), since: now}
	return false, nil, a.counting
}

// underWay returns how many claims the store has not answered.
func (a *allowance) underWay() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.claiming
}

// admit admits the claim that has counted if there is room beside the n keys that it has found,
// and the claims that were under way when it began to count or are now. It returns how many others
// may follow.
func (a *allowance) admit(n, before, most int) (left int, admitted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	room := most - n - max(before, a.claiming)
	if room <= 0 {
		return 0, false
	}
	a.claiming++
	return room / 4, true // the claim that asked is one of them
}

// answered ends a claim.
func (a *allowance) answered() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.claiming--
}

// counted ends a count. Its result is outdated if another was used since it began.
func (a *allowance) counted(self *counting, left int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(self.done)
	if a.counting == self {
		a.counting = nil
	}
	if now := time.Now(); !self.since.Before(a.known) {
		a.known, a.left, a.until = now, left, now.Add(allowanceTime)
	}
}
