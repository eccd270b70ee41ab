package relay

import (
	"errors"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// outcome handles an outcome that the sink has reported.
func (e *engine) outcome(m *entry, now time.Time, err error) {
	if m.state != inFlight {
		// The first of two outcomes of a message counts, but a confirm always counts.
		if err == nil {
			e.confirmLate(m, now)
		}
		return
	}
	l := m.lane
	e.inFlight--
	l.inFlight--
	if l.alone == m {
		l.alone, l.stale = nil, true
	}
	kind := classify(err)
	if m.parked && kind != confirmedOutcome {
		e.waste(now)
	}
	if kind == unroutableOutcome && e.drops(m.Topic) {
		kind = confirmedOutcome
	}
	lost := e.lanes[l.number] != l
	if lost {
		m.state = waiting // nothing more is done about it here, unless it is confirmed
	}
	switch kind {
	case confirmedOutcome:
		e.confirm(m, now)
	case interruptedOutcome:
		m.unanswered = true
		e.unrelated(m)
		if !lost {
			e.interrupted(m, now)
		}
	case unavailableOutcome:
		slow := !now.Before(m.deadline) && e.passed > m.sent
		m.unanswered = true
		if slow {
			e.doubt(m, now, err, lost)
			break
		}
		e.unavailable(m, e.sent, now, err)
		switch {
		case lost:
		case e.overfull(now, kind):
			e.leaveTopic(m)
			e.postpone(m, now, classUnavailable, err.Error())
		default:
			e.putBack(m)
		}
	case refusedOutcome:
		e.unrelated(m)
		if !lost {
			e.charge(m, now, m.class(), err.Error())
		}
	case unroutableOutcome, unknownOutcome:
		e.doubt(m, now, err, lost)
	}
	if l.restart(now) {
		e.terms++
		l.term = e.terms
	}
}

// drops calls Config.Unroutable. A panic there counts as a refusal.
func (e *engine) drops(topic string) (drop bool) {
	_ = nopanic.Call(func() error {
		drop = e.unroutable != nil && e.unroutable(topic) == UnroutableDrop
		return nil
	})
	return drop
}

// confirm handles a message that the broker has.
func (e *engine) confirm(m *entry, now time.Time) {
	l := m.lane
	m.arrived = true
	l.retry.Reset()
	e.passedAt = now
	e.works(m.Topic)
	if m.failedAt > 0 && e.suspected != nil {
		e.suspected(m, nil)
	}
	if len(e.topics) > 0 || e.room > 0 {
		for _, guilty := range e.pass(m) {
			e.charge(guilty, now, guilty.failure.class, guilty.failure.text)
		}
		if e.room >= e.window {
			e.room = 0
		}
	}
	l.confirm(m)
	if m.parked {
		e.settled = append(e.settled, m)
		return
	}
	e.addConfirmed(m, now)
}

// putBack keeps an unavailable message.
func (e *engine) putBack(m *entry) {
	switch {
	case m.lane.draining:
		m.state = waiting
	case e.inOrder:
		m.state = again
		m.lane.repeat = append(m.lane.repeat, m)
		m.lane.restarting = true
	default:
		e.withhold(m)
	}
}

// interrupted returns a message to its lane, which resumes after a moment.
func (e *engine) interrupted(m *entry, now time.Time) {
	l := m.lane
	switch {
	case l.draining:
		m.state = waiting
	case e.inOrder:
		e.putBack(m)
	default:
		l.push(m)
		if !now.Before(l.retryAt) {
			l.retryAt = now.Add(l.retry.NextBackOff())
		}
	}
}

// confirmLate handles a confirm for a message that is no longer in flight: the broker
// has it, whatever has become of its row meanwhile. The row may have been read again,
// moved to parked, or belong to another worker now.
func (e *engine) confirmLate(m *entry, now time.Time) {
	if m.arrived {
		return
	}
	m.arrived = true
	for _, l := range []*lane{e.lanes[m.Lane], m.lane} {
		if l != nil && l.entries[m.rowID()] != nil {
			m = l.entries[m.rowID()]
			break
		}
	}
	switch m.state {
	case inFlight: // another copy
		e.outcome(m, now, nil)
		return
	case confirmed:
		return
	case charged, follower, forgotten:
		// It is being moved, or was. Whichever of the move and the deletion is first,
		// the other one finds nothing; a moved row is settled after the deletion.
		m.late = true
		if m.parked {
			e.settled = append(e.settled, m)
		} else {
			e.addConfirmed(m, now)
		}
		return
	default:
	}
	e.purge(func(o *entry) bool { return o == m })
	if m.lane.announced == m {
		m.lane.cancel()
	}
	e.confirm(m, now)
}

// doubt handles an outcome that may be the fault of the message or of its topic.
func (e *engine) doubt(m *entry, now time.Time, err error, lost bool) {
	class := classUnknown
	switch {
	case errors.Is(err, ErrUnroutable):
		class = classUnroutable
	case errors.Is(err, ErrUnavailable):
		class = classSlow
	}
	m.failure = &failure{class: class, text: err.Error()}
	switch {
	case lost || m.lane.draining:
		e.unrelated(m)
		m.state = waiting
	case e.unclear(m, e.sent, now, err):
		e.charge(m, now, class, err.Error())
	case m.state == suspected && (e.overfull(now, classify(err)) || e.tooManySuspects(now, classify(err))):
		e.leaveTopic(m)
		e.postpone(m, now, class, err.Error())
	case e.inOrder || m.state == inFlight:
		e.putBack(m)
	}
}
