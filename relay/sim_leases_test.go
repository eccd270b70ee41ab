package relay

import (
	"slices"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// renew extends trust, gives up what was lost, takes what is free, and hands
// over a lane now and then.
func (s *simulation) renew(w *simWorker) {
	for number := range 4 {
		lease := &s.leases[number]
		l := w.lanes[number]
		switch {
		case l != nil && (lease.worker != w.number || lease.epoch != l.epoch):
			w.drop(number)
		case l != nil && l.draining && w.idle(l):
			unsure := l.isUnsure()
			w.drop(number)
			if s.faults && s.rng.IntN(6) == 0 {
				s.stats["not released"]++
				break
			}
			s.release(number, unsure)
		case l == nil && lease.worker == w.number: // it could not release it
			s.release(number, true)
		case l != nil:
			lease.until = s.now.Add(simTerm)
			w.trust(number, l.epoch, lease.until)
			if s.faults && s.rng.IntN(30) == 0 {
				w.drain(number)
			}
		case lease.worker == -1 && w.mayHold(number):
			s.hold(w, number)
		}
	}
}

// release gives a lane back.
func (s *simulation) release(number int, unsure bool) {
	lease := &s.leases[number]
	lease.worker, lease.alone = -1, 0
	if unsure {
		lease.unsure = s.now
	}
}

// hold gives a lane to w. What other workers have sent of it and not deleted, w
// may send again; what w itself has sent, it may not.
func (s *simulation) hold(w *simWorker, number int) {
	for _, other := range s.workers {
		if other == w {
			continue
		}
		for _, m := range other.inFlight[number] {
			s.rows[m.ID].excused++
		}
		s.excuseConfirmed(other, number)
	}
	lease := &s.leases[number]
	if lease.died && (lease.alone != 0 || lease.crashes < 2 && len(s.table[number])+len(s.parking.parked[number]) > 0) {
		lease.crashes++
	}
	if lease.expired && lease.until.After(lease.unsure) {
		lease.unsure = lease.until
	}
	lease.until = s.now.Add(simTerm)
	lease.worker, lease.died, lease.expired = w.number, false, false
	lease.epoch++
	w.hold(number, relaystore.Taken{Epoch: lease.epoch, Crashes: lease.crashes, Alone: lease.alone, UnsureUntil: lease.unsure}, s.now.Add(simTerm))
}

// expire frees a lane whose owner's trust has run out, so that anybody may take
// it next, its owner too.
func (s *simulation) expire(w *simWorker) {
	number := s.rng.IntN(4)
	if l := w.lanes[number]; s.faults && l != nil && s.leases[number].worker == w.number && s.now.After(l.trusted) {
		s.leases[number].worker, s.leases[number].expired = -1, true
		s.stats["expired"]++
	}
}

// takeOver takes a lane from another worker whose trust has run out.
func (s *simulation) takeOver(w *simWorker) {
	number := s.rng.IntN(4)
	lease := &s.leases[number]
	if !s.faults && s.workerOf(lease) != nil {
		return
	}
	if lease.worker == w.number || lease.worker == -1 || !w.mayHold(number) {
		return
	}
	if other := s.workerOf(lease); other != nil {
		l := other.lanes[number]
		if l != nil && !s.now.After(l.trusted) {
			return // the lease has not expired
		}
		s.stats["takeovers"]++
	}
	lease.expired = true
	s.hold(w, number)
}

func (s *simulation) workerOf(l *simLease) *simWorker {
	if l.worker < 0 || l.worker >= len(s.workers) || s.workers[l.worker].lanes == [outbox.Lanes]*lane{} {
		return nil
	}
	return s.workers[l.worker]
}

func (s *simulation) excuseConfirmed(w *simWorker, number int) {
	for _, m := range slices.Concat(w.removals.confirmed, w.removals.removing, w.removals.locked, w.tasks.retried) {
		if m.Lane == number {
			s.rows[m.ID].excused++
		}
	}
}

// crash loses a worker's memory; its messages may still arrive, or not.
func (s *simulation) crash(w *simWorker) {
	s.stats["crashes"]++
	for number := range w.inFlight {
		lost := false
		for _, m := range w.inFlight[number] {
			s.rows[m.ID].excused++
			lost = lost || !m.arrived && s.rng.IntN(2) == 0 // a channel loses its tail
			if !lost && s.welcome(m) {
				s.arrive(m)
			}
		}
		s.excuseConfirmed(w, number)
		w.inFlight[number] = nil
		if s.leases[number].worker == w.number {
			s.leases[number].worker, s.leases[number].died, s.leases[number].expired = -1, true, true // the lease expires
		}
	}
	if w.removal != nil && !w.removal.committed && s.rng.IntN(2) == 0 {
		s.commitRemoval(w)
	}
	if w.task != nil && !w.task.committed && s.rng.IntN(2) == 0 {
		s.parking.work(w)
	}
	w.engine, w.read, w.removal, w.task, w.late = s.newEngine(w.number), nil, nil, nil, nil
	w.terms = map[int64]uint64{} // and a new sink
	w.told = nil
	s.learnAtOnce(w)
}
