package relay

import (
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// upkeepLane is the lease under which one worker maintains the tables.
const upkeepLane = -1

// lease is a row of relay_leases as one statement saw it.
type lease struct {
	lane  int
	owner string
	epoch int64
	left  time.Duration // until it expires, by the database's clock; negative since it did
	until int64         // when that is, in microseconds
}

// peer is a live row of relay_workers.
type peer struct {
	owner    string
	ready    bool // reaches its sink
	stopping bool
	until    int64 // when it stops counting, in microseconds
}

// shares are the lanes that a worker is to take and to give back.
type shares struct {
	take   []int // candidates
	most   int   // of take
	give   []int
	upkeep bool // the upkeep is free to take
	leave  bool // the upkeep, to another worker
}

// divide computes the shares of worker me. It holds the lanes in held (without those it
// is giving back) and may take those that mayHold admits.
//
// A worker that stops, or that reaches no sink while another one does, has no share. A
// worker takes free lanes up to its share, rounded up. It takes a lane above that once
// the lane has been free for longer than a lease, so that no lane is orphaned by a
// worker that counts but does not work. It gives lanes back only while a worker with a
// share has fewer than the share rounded down, and no more than are missing. It also
// gives back what it has above the share rounded up. So a fair division is left alone,
// and lanes do not wander. The upkeep goes to the first worker that takes it. A worker
// that may not hold it takes it only if no other one has for a fifth of a lease.
func divide(me string, peers []peer, leases []lease, held []int, mayHold func(lane int) bool, term time.Duration) shares {
	anyReady := false
	for _, p := range peers {
		anyReady = anyReady || p.ready && !p.stopping
	}
	eligible := map[string]bool{}
	for _, p := range peers {
		eligible[p.owner] = !p.stopping && (p.ready || !anyReady)
	}
	count := 0
	for _, ok := range eligible {
		if ok {
			count++
		}
	}
	switch {
	case count == 0:
		return shares{} // nobody can work: all keep what they have
	case !eligible[me]:
		return shares{give: held, leave: true}
	}
	up, down := (outbox.Lanes+count-1)/count, outbox.Lanes/count

	var s shares
	var free, orphaned []int
	counts := map[string]int{}
	for _, l := range leases {
		switch {
		case l.lane == upkeepLane:
			s.upkeep = l.left < 0 && (mayHold(l.lane) || count == 1 || l.left < -term/5)
		case l.left >= 0:
			counts[l.owner]++
		case mayHold(l.lane):
			free = append(free, l.lane)
			if l.left < -term {
				orphaned = append(orphaned, l.lane)
			}
		}
	}
	missing := -len(free)
	for owner, ok := range eligible {
		if ok && owner != me {
			missing += max(0, down-counts[owner])
		}
	}
	s.take, s.most = free, up-len(held)
	if len(held) >= down {
		s.most = min(s.most, -missing) // the rest is for workers that have fewer
	}
	if s.most < len(orphaned) {
		s.take, s.most = orphaned, len(orphaned)
	}
	if surplus := max(min(len(held)-down, missing), len(held)-up); surplus > 0 {
		s.take, s.most = nil, 0
		s.give = held[len(held)-surplus:]
	}
	return s
}
