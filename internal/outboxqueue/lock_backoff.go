package outboxqueue

import (
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// lockBackoff decides how the upkeep asks for the lock on a partition that others hold,
// since readers queue behind each attempt.
//
// Short-lived holders are reads. The next attempt waits up to twice as long, to outlast
// them. It is not postponed, since dead rows make reads longer. Behind a holder that
// stays (a dump) an attempt is futile: the next one waits for as long as that has
// lasted already, and at most half a minute.
type lockBackoff struct {
	mu      sync.Mutex // guards what follows
	doubled int        // how often the lock timeout was doubled; reads lock all partitions
	parts   [outboxstore.Partitions]partitionBackoff
}

type partitionBackoff struct {
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
func (b *lockBackoff) may(i int, now time.Time) (wait time.Duration, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return shortestWait << b.doubled, !now.Before(b.parts[i].until)
}

// pause returns the time to wait before the next attempt, or 0 if it is to be
// postponed: readers get four times as long as an attempt may keep them waiting.
func (b *lockBackoff) pause(i int, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now.Before(b.parts[i].until) {
		return 0
	}
	return max(soonest, 4*shortestWait<<b.doubled)
}

// free records that nobody blocks the upkeep.
func (b *lockBackoff) free(i int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.parts[i] = partitionBackoff{}
}

// allFree records that nothing is to be truncated.
func (b *lockBackoff) allFree() {
	for i := range b.parts {
		b.free(i)
	}
}

// granted records that the lock was granted.
func (b *lockBackoff) granted(i int) {
	b.free(i)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.doubled = max(0, b.doubled-1)
}

// refused records a failed attempt, and the transactions that hold the lock now.
func (b *lockBackoff) refused(i int, now time.Time, holders []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	part := &b.parts[i]
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
		b.doubled = min(b.doubled+1, mostDoubled)
		return
	}
	b.doubled, part.until = 0, now.Add(min(longest, longestBackoff))
}

// blocked reports whether the last attempt on any partition was blocked.
func (b *lockBackoff) blocked() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.parts {
		if b.parts[i].blocked {
			return true
		}
	}
	return false
}
