package outboxstore

import "sync"

// toll finds the partitions of the ring whose dead index entries slow reads down. Since
// ids reached the partition being written, reads have passed over so many entries that
// a clean partition is cheaper. Without an old snapshot each entry is passed over about
// once, which stays below that limit in a whole turn.
type toll struct {
	mu    sync.Mutex // guards what follows
	turn  int64
	paid  [4]int64 // entries passed over by all scans until the turn began
	begun bool
}

// mostPassed is two for each id of a turn: taking all of its ids costs as much as
// passing over about 100,000 entries.
const mostPassed = 2 << 16

// due takes the last id given out and the entries passed over by all scans so far. It
// reports for each partition whether those of this turn are too many. Counters that
// went back, for example after a truncation, start again.
func (t *toll) due(last int64, passed [4]int64) (due [4]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if turn := last >> 16; !t.begun || t.turn != turn {
		t.begun, t.turn, t.paid = true, turn, passed
	}
	for i := range due {
		if passed[i] < t.paid[i] {
			t.paid[i] = passed[i]
		}
		due[i] = passed[i]-t.paid[i] >= mostPassed
	}
	return due
}
