package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

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
//
// An operator may have had a worker give a lane back (handovers: lanes, and who did). Another
// worker takes that one whatever its share, and that worker does only if it is alone, or if nobody
// has for longer than a lease.
func divide(me string, peers []relaystore.Worker, leases []relaystore.Lease, held []int, mayHold func(lane int) bool, handovers map[int]string, term time.Duration) shares {
	anyReady := false
	for _, p := range peers {
		anyReady = anyReady || p.Ready && !p.Stopping
	}
	eligible := map[string]bool{}
	for _, p := range peers {
		eligible[p.Owner] = !p.Stopping && (p.Ready || !anyReady)
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
		case l.Lane == relaystore.UpkeepLane:
			s.upkeep = l.Left < 0 && (mayHold(l.Lane) || count == 1 || l.Left < -term/5)
		case l.Left >= 0:
			counts[l.Owner]++
		case handovers[l.Lane] == me && count > 1 && l.Left >= -term: // for another one
		case mayHold(l.Lane):
			free = append(free, l.Lane)
			if by := handovers[l.Lane]; l.Left < -term || by != "" && by != me {
				orphaned = append(orphaned, l.Lane)
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

// outdated reports whether worker me, which holds lanes in these epochs, was paused since
// its last heartbeat for so long that it no longer counts, or that lanes are another's. Its
// shares must not be computed then: they would give away lanes that it does not know it
// has lost, or that are still its own.
func outdated(me string, peers []relaystore.Worker, leases []relaystore.Lease, epochs map[int]int64) bool {
	if !slices.ContainsFunc(peers, func(p relaystore.Worker) bool { return p.Owner == me }) {
		return true
	}
	return slices.ContainsFunc(leases, func(l relaystore.Lease) bool {
		epoch, held := epochs[l.Lane]
		return held && epoch != l.Epoch
	})
}
