package relay

import (
	"fmt"
	"maps"
)

// operate has operators pause or resume something, or a worker read that.
func (s *simulation) operate(w *simWorker) {
	switch {
	case !s.steered:
		s.renew(w)
	case s.rng.IntN(2) == 0:
		s.steer()
	default:
		s.learn(w)
	}
}

// steer has operators pause something, or resume it. In the end nothing is paused.
func (s *simulation) steer() {
	toggle := func(set *map[string]bool, name string, rarely int) {
		next := maps.Clone(*set) // workers keep what they were told
		if next == nil {
			next = map[string]bool{}
		}
		switch {
		case next[name]:
			delete(next, name)
		case s.rng.IntN(rarely) == 0:
			next[name] = true
			s.stats["paused"]++
		}
		*set = next
	}
	if !s.faults || s.rng.IntN(6) == 0 {
		s.pauses = pauses{}
		return
	}
	topic := fmt.Sprint("t", s.rng.IntN(3))
	switch s.rng.IntN(4) {
	case 0:
		toggle(&s.pauses.topics, topic, 3)
	case 1:
		toggle(&s.pauses.sinks, "sink of "+topic, 6)
	case 2:
		toggle(&s.pauses.keys, fmt.Sprint("k", s.rng.IntN(3)), 3)
	case 3:
		lane := s.rng.IntN(4)
		s.pauses.lanes[lane] = !s.pauses.lanes[lane] && s.rng.IntN(4) == 0
	}
}

// learnAtOnce has a new worker read the pauses, unless that takes it a while.
func (s *simulation) learnAtOnce(w *simWorker) {
	if !s.steered || s.rng.IntN(2) == 0 {
		s.learn(w)
	}
}

// learn has a worker read the pauses.
func (s *simulation) learn(w *simWorker) {
	told := s.pauses
	w.told = &told
	w.pause(told, s.now)
}

// checkPaused looks for a message that is handed over although its worker knows that it is
// paused, or does not know yet what is.
func (s *simulation) checkPaused(w *simWorker, m *entry) {
	t := w.told
	if t == nil || t.topics[m.Topic] || t.sinks["sink of "+m.Topic] || m.Key != "" && t.keys[m.Key] || t.lanes[m.Lane] {
		s.stats["sent while paused"]++
	}
	s.stats["kept while paused"] += len(w.paused.withheld)
}
