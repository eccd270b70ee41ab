package outbox

import "sync"

// toll decides when the ring is turned early: when reads have passed over so many
// dead entries in the partition being written that leaving it for a clean one is
// cheaper. Without an old snapshot each entry is passed over about once, and that
// does not come to as much in a whole turn.
type toll struct {
	mu   sync.Mutex // guards what follows
	turn int64
	paid int64 // entries passed over by all scans until the turn began
	told bool
}

// mostPassed is two for each id of a turn: taking all of its ids costs as much as
// passing over some 100,000 entries.
const mostPassed = 2 << 16

// due takes the last id given out and the entries passed over by all scans so far,
// and reports whether those of this turn are too many. Counters that went back
// begin anew.
func (t *toll) due(last, passed int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if turn := last >> 16; !t.told || t.turn != turn || passed < t.paid {
		t.told, t.turn, t.paid = true, turn, passed
	}
	return passed-t.paid >= mostPassed
}
