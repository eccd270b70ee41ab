package outboxqueue

import (
	"sync"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// deadScans finds the partitions of the ring whose dead index entries slow reads down.
// Since ids reached the partition being written, reads have passed over so many entries
// that a clean partition is cheaper. Without an old snapshot each entry is passed over
// about once, which stays below that limit in a whole turn.
type deadScans struct {
	mu     sync.Mutex // guards what follows
	turn   int64
	before [outboxstore.Partitions]int64 // entries passed over by all scans until the turn began
	begun  bool
}

// mostPassedOver is two for each id of a turn: taking all of its ids costs as much as
// passing over about 100,000 entries.
const mostPassedOver = 2 << 16

// slow reports for each partition whether the entries passed over in this turn are too
// many. Counters that went back, for example after a truncation, start again.
func (d *deadScans) slow(ring outboxstore.Ring) (slow [outboxstore.Partitions]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	turn := outboxstore.TurnOf(ring.Last)
	begins := !d.begun || d.turn != turn
	d.begun, d.turn = true, turn
	for i, p := range ring.Partitions {
		if begins || p.PassedOver < d.before[i] {
			d.before[i] = p.PassedOver
		}
		slow[i] = p.PassedOver-d.before[i] >= mostPassedOver
	}
	return slow
}
