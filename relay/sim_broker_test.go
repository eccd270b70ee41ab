package relay

import (
	"errors"
	"slices"
)

// broker moves one lane's messages: arrivals in order, then outcomes. A confirm
// may be lost after the arrival; a refusal or a failure comes without one.
func (s *simulation) broker(w *simWorker) {
	if len(w.late) > 0 && s.rng.IntN(8) == 0 {
		m := w.late[0]
		w.late = w.late[1:]
		s.stats["late confirms"]++
		w.outcome(m, s.now, nil)
		return
	}
	number := s.rng.IntN(4)
	sent := w.inFlight[number]
	if len(sent) == 0 {
		return
	}
	i := s.rng.IntN(len(sent))
	m := sent[i]
	if !m.arrived && s.faults && s.rng.IntN(10) == 0 {
		// Not sent at all: the rest of the channel fails with it.
		outcome := Unavailable(errors.New("channel closed"))
		if s.rng.IntN(2) == 0 {
			outcome = Interrupted(errors.New("channel replaced"))
			s.stats["interruptions"]++
		}
		for _, f := range sent[i:] {
			if f.arrived {
				s.rows[f.ID].excused++
				s.confirmLater(w, f.entry)
			}
			s.doubt(s.rows[f.ID])
			w.outcome(f.entry, s.now, outcome)
		}
		w.inFlight[number] = sent[:i]
		s.stats["failures"]++
		return
	}
	row := s.rows[m.ID]
	if down := s.down[m.Topic]; !m.arrived && (down != nil || row.poison > 0) {
		w.inFlight[number] = slices.Delete(slices.Clone(sent), i, i+1)
		if !errors.Is(down, ErrUnavailable) {
			delete(w.terms, m.ID)
		}
		if down == nil {
			row.poison--
			row.blamed = true
			s.stats["refusals"]++
			w.outcome(m.entry, s.now, row.says)
		} else {
			s.doubt(row)
			w.outcome(m.entry, s.now, down)
		}
		return
	}
	if row.lethal {
		s.stats["killed"]++
		s.crash(w)
		return
	}
	for _, before := range sent[:i+1] {
		if s.welcome(before) {
			s.arrive(before)
		}
	}
	if s.rng.IntN(2) == 0 {
		return // the confirm comes later
	}
	w.inFlight[number] = slices.Delete(slices.Clone(sent), i, i+1)
	if s.faults && s.rng.IntN(15) == 0 {
		row.excused++
		s.doubt(row)
		s.stats["lost confirms"]++
		s.confirmLater(w, m.entry)
		lost := errors.New("confirm lost")
		if s.rng.IntN(2) == 0 {
			lost = Unavailable(lost)
		}
		w.outcome(m.entry, s.now, lost)
		return
	}
	w.outcome(m.entry, s.now, nil)
}

// confirmLater lets a confirm come after the outcome, or never.
func (s *simulation) confirmLater(w *simWorker, m *entry) {
	if s.rng.IntN(2) == 0 {
		w.late = append(w.late, m)
	}
}

// doubt notes that a message had no answer, or was sent while its topic was down.
func (s *simulation) doubt(r *simRow) {
	if !r.doubted {
		r.doubted, r.before = true, len(s.wire)
	}
}

// mayDoubt reports that a failed message may be taken for the cause: another one of
// its topic has passed since.
func (s *simulation) mayDoubt(r *simRow) bool {
	return r.doubted && slices.ContainsFunc(s.wire[r.before:], func(o *simRow) bool { return o.Topic == r.Topic })
}

// welcome reports that the broker would take a message.
func (s *simulation) welcome(m *simMessage) bool {
	r := s.rows[m.ID]
	return s.down[m.Topic] == nil && r.poison == 0 && !r.lethal
}

func (s *simulation) arrive(m *simMessage) {
	if m.arrived {
		return
	}
	m.arrived = true
	r := s.rows[m.ID]
	r.copies++
	s.wire = append(s.wire, r)
	if slices.ContainsFunc(s.parking.letters, func(l *simDeadLetter) bool { return l.row == r && l.state != "closed" && !l.unsure }) {
		s.stats[silentLetters]++
	}
	if s.faults && s.rng.IntN(4) == 0 { // and whoever sends it again is refused
		r.poison, r.says = 1+s.rng.IntN(5), Refused(errors.New("not any more"))
	}
}
