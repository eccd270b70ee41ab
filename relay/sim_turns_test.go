package relay

import (
	"slices"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// checkTurns looks at what the lanes with crashes have in flight: it is recorded, a message that must
// be alone is so, and not too many lanes would be suspected of a crash.
func (s *simulation) checkTurns(w *simWorker) {
	alone := 0 // messages
	for _, l := range w.lanes {
		if l == nil {
			continue
		}
		if l.alone != nil || l.announced != nil && l.announced.mustBeAlone() {
			alone++
		}
		if lease := s.leases[l.number]; l.inFlight > 0 && lease.worker == w.number && lease.epoch == l.epoch {
			var names int64
			switch {
			case l.alone != nil:
				names = l.alone.ID
			case lease.crashes >= isolatedFrom, l.together, slices.Contains(w.isolation.ending, l) && l.crashes > 0:
				names = relaystore.WholeLane
			}
			blamed := func(m *entry) bool { return m.ID == lease.alone } // recording its failure clears it
			cleared := lease.crashes < isolatedFrom && lease.alone == 0  // the end of the crashes was late
			if lease.alone != names && !cleared && !slices.ContainsFunc(l.failing, blamed) {
				s.stats["in flight without a record"]++
			}
		}
	}
	now, before := sharing(w.lanes[:], func(l *lane) bool { return l.together || l.announced != nil && !l.announced.mustBeAlone() }),
		sharing(w.isolation.ending, func(l *lane) bool { return w.live(l) && l.crashes > 0 && l.inFlight > 0 })
	if before > 0 {
		s.stats["turns that overlap"]++
	}
	if alone > 1 || alone == 1 && now+before > 0 || now > turnLanes || before > 3*turnLanes {
		s.stats["isolated lanes beside one another"]++
	}
}

// sharing counts lanes that share a turn. One with more than two crashes counts as all that may.
func sharing(lanes []*lane, counts func(*lane) bool) (n int) {
	for _, l := range lanes {
		switch {
		case l == nil || !counts(l):
		case l.crashes > isolatedFrom:
			n += turnLanes
		default:
			n++
		}
	}
	return n
}
