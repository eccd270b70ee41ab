package outboxstore

import (
	"sync"
	"time"
)

// patience decides how the upkeep asks for the lock on a partition that others hold,
// since readers queue behind each attempt.
//
// Short-lived holders are reads. The next attempt waits up to twice as long, to outlast
// them. It is not postponed, since dead rows make reads longer. Behind a holder that
// stays (a dump) an attempt is futile: the next one waits for as long as that has
// lasted already, and at most half a minute.
type patience struct {
	mu      sync.Mutex // guards what follows
	doubled int        // how often the lock timeout was doubled; reads lock all partitions
	parts   [4]partPatience
}

type partPatience struct {
	blocked bool // according to the last attempt
	until   time.Time
	seen    map[string]time.Time // transactions that held the lock after an attempt, since when
}

const (
	shortestWait   = 10 * time.Millisecond
	mostDoubled    = 4 // 160 ms
	soonest        = 100 * time.Millisecond
	longHeld       = time.Second
	longestBackoff = 30 * time.Second

	// A statement may take this many lock timeouts: checking the rows takes time too,
	// and a partition that dead rows have made large is not skipped.
	statementWaits = 25
)

// may reports whether a partition may be tried, and how long to wait for its lock.
func (p *patience) may(i int, now time.Time) (wait time.Duration, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return shortestWait << p.doubled, !now.Before(p.parts[i].until)
}

// pause returns the time to wait before the next attempt, or 0 if it is to be
// postponed: readers get four times as long as an attempt may keep them waiting.
func (p *patience) pause(i int, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Before(p.parts[i].until) {
		return 0
	}
	return max(soonest, 4*shortestWait<<p.doubled)
}

// free records that nobody blocks the upkeep.
func (p *patience) free(i int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.parts[i] = partPatience{}
}

// allFree records that nothing is to be truncated.
func (p *patience) allFree() {
	for i := range p.parts {
		p.free(i)
	}
}

// granted records that the lock was granted.
func (p *patience) granted(i int) {
	p.free(i)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.doubled = max(0, p.doubled-1)
}

// refused records a failed attempt, and the transactions that hold the lock now.
func (p *patience) refused(i int, now time.Time, holders []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	part := &p.parts[i]
	seen := make(map[string]time.Time, len(holders))
	var longest time.Duration
	for _, h := range holders {
		since, known := part.seen[h]
		if !known {
			since = now
		}
		seen[h] = since
		longest = max(longest, now.Sub(since))
	}
	part.blocked, part.seen = true, seen
	if longest < longHeld {
		p.doubled = min(p.doubled+1, mostDoubled)
		return
	}
	p.doubled, part.until = 0, now.Add(min(longest, longestBackoff))
}

// blocked reports whether the last attempt on any partition was blocked.
func (p *patience) blocked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.parts {
		if p.parts[i].blocked {
			return true
		}
	}
	return false
}

// rest is a period during which something is not retried.
type rest struct {
	mu    sync.Mutex // guards what follows
	until time.Time
}

func (r *rest) begin(until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until = until
}

// lasts reports whether the rest is not over.
func (r *rest) lasts(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return now.Before(r.until)
}
