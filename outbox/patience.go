package outbox

import (
	"sync"
	"time"
)

// patience keeps the upkeep from asking again and again for a lock that somebody
// holds for long, since readers queue behind each attempt: the next one waits for
// as long as the partition has been held already, and at most half a minute.
type patience struct {
	mu    sync.Mutex // guards what follows
	since [4]time.Time
	until [4]time.Time
}

const longestPatience = 30 * time.Second

// may reports whether a partition may be tried.
func (p *patience) may(i int, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !now.Before(p.until[i])
}

// tried notes an attempt that was or was not in somebody's way.
func (p *patience) tried(i int, now time.Time, blocked bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !blocked:
		p.since[i], p.until[i] = time.Time{}, time.Time{}
	case p.since[i].IsZero():
		p.since[i] = now
	default:
		p.until[i] = now.Add(min(now.Sub(p.since[i]), longestPatience))
	}
}

// blocked reports whether the last attempt on any partition was.
func (p *patience) blocked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, since := range p.since {
		if !since.IsZero() {
			return true
		}
	}
	return false
}
