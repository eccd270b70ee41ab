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
	if len(before) > 0 {
		s.stats["turns that overlap"]++
	}
	if alone > 1 || alone == 1 && len(now)+len(before) > 0 || len(now) > turnLanes || len(now) > 1 && suspects(now) > len(now) || suspects(before) > mostEnding {
		s.stats["isolated lanes beside one another"]++
	}
}

// sharing returns the lanes that count.
func sharing(lanes []*lane, counts func(*lane) bool) []*lane {
	return slices.DeleteFunc(slices.Clone(lanes), func(l *lane) bool { return l == nil || !counts(l) })
}
