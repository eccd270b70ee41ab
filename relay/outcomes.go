package relay

import (
	"errors"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// outcome handles an outcome that the sink has reported.
func (e *engine) outcome(m *entry, now time.Time, err error) {
	if m.state != stateInFlight {
		// The first of two outcomes of a message counts, but a confirm always counts.
		if err == nil {
			e.confirmLate(m, now)
		}
		return
	}
	l := m.lane
	e.publishing.inFlight--
	l.inFlight--
	if l.alone == m {
		l.alone, l.stale = nil, true
	}
	kind := classify(err)
	m.stack = nopanic.Stack(err)
	if m.retrying && kind != outcomeConfirmed {
		e.budget.spend(now)
	}
	if kind == outcomeUnroutable && e.drops(m.Topic) {
		kind = outcomeConfirmed
	}
	lost := e.lanes[l.number] != l
	if lost {
		m.state = stateWaiting // nothing more is done about it here, unless it is confirmed
	}
	if kind == outcomeRefused || kind == outcomeUnroutable {
		l.through++ // the worker has survived it
	}
	switch kind {
	case outcomeConfirmed:
		e.confirm(m, now)
	case outcomeInterrupted:
		m.unanswered = true
		e.circuits.unrelated(m)
		if !lost {
			e.interrupted(m, now)
		}
	case outcomeUnavailable:
		slow := !now.Before(m.deadline) && e.circuits.passed > m.sent
		m.unanswered = true
		if e.circuits.inOrder && !lost && !l.draining {
			l.restarting = true // wherever m goes: the sink may have ended the term
		}
		if slow {
			e.doubt(m, now, err, lost)
			break
		}
		e.circuits.unavailable(m, e.publishing.sent, now, err)
		switch {
		case lost:
		case e.circuits.overfull(now, kind):
			e.circuits.leave(m)
			e.postpone(m, now, classUnavailable, err.Error())
		default:
			e.putBack(m)
		}
	case outcomeRefused:
		e.circuits.unrelated(m)
		if !lost {
			e.charge(m, now, m.class(), err.Error())
		}
	case outcomeUnroutable:
		e.doubt(m, now, err, lost)
	case outcomeUnknown:
		m.unanswered = true // who waits for a confirm in vain says so in an error, too
		e.doubt(m, now, err, lost)
	}
	if l.restart(now) {
		e.publishing.terms++
		l.term = e.publishing.terms
	}
}

// drops calls Config.DropUnroutable. A panic there counts as a refusal, and so does an end of its
// goroutine, which is not the loop's.
func (e *engine) drops(topic string) (drop bool) {
	if e.limits.dropUnroutable == nil {
		return false
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = nopanic.Call(func() error {
			drop = e.limits.dropUnroutable(topic)
			return nil
		})
	}()
	<-ended
	return drop
}

// confirm handles a message that the broker has.
func (e *engine) confirm(m *entry, now time.Time) {
	l := m.lane
	m.arrived = true
	l.retry.Reset()
	e.circuits.passedAt = now
	e.ahead.works(m.Topic)
	e.paused.passed = max(e.paused.passed, m.sent)
	if m.failedAt > 0 && e.circuits.becameUnclear != nil {
		e.circuits.becameUnclear(m, nil)
	}
	if len(e.circuits.topics) > 0 || e.circuits.room > 0 {
		down := e.circuits.sinkDown
		for _, blamed := range e.circuits.pass(m) {
			e.charge(blamed, now, blamed.failure.Class, blamed.failure.Text)
		}
		if down && !e.circuits.sinkDown {
			e.circuits.room += e.publishing.inFlight // from before: they may stay without an answer for long
		}
		if e.circuits.room >= e.limits.window {
			e.circuits.room = 0
		}
	}
	l.confirm(m)
	if m.retrying {
		e.tasks.retried = append(e.tasks.retried, m)
		return
	}
	e.removals.add(m, now)
}

// putBack keeps an unavailable message.
func (e *engine) putBack(m *entry) {
	switch {
	case m.lane.draining:
		m.state = stateWaiting
	case !e.circuits.inOrder && e.paused.on(m):
		e.withholdPaused(m)
	case e.circuits.inOrder:
		m.state = stateAgain
		m.lane.repeat = append(m.lane.repeat, m)
		m.lane.restarting = true
	default:
		e.circuits.withhold(m)
	}
}

// interrupted returns a message to its lane, which resumes after a moment.
func (e *engine) interrupted(m *entry, now time.Time) {
	l := m.lane
	switch {
	case l.draining:
		m.state = stateWaiting
	case e.circuits.inOrder:
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
// retried, or belong to another worker now.
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
	case stateInFlight: // another copy
		e.outcome(m, now, nil)
		return
	case stateConfirmed:
		return
	case stateFailed, stateFollower, stateForgotten:
		// It is being moved, or was. Whichever of the move and the deletion is first,
		// the other one finds nothing; a moved row is removed after the deletion.
		m.late = true
		if m.retrying {
			e.tasks.retried = append(e.tasks.retried, m)
		} else {
			e.removals.add(m, now)
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
	m.failure = &relaystore.Failure{Class: class, Text: err.Error(), Stack: m.stack}
	switch {
	case lost || m.lane.draining:
		e.circuits.unrelated(m)
		m.state = stateWaiting
	case e.circuits.unclear(m, e.publishing.sent, now, err):
		e.charge(m, now, class, err.Error())
	case m.state == stateUnclear && (e.circuits.overfull(now, classify(err)) || e.circuits.tooManyUnclear(now, classify(err))):
		e.circuits.leave(m)
		e.postpone(m, now, class, err.Error())
	case e.circuits.inOrder || m.state == stateInFlight:
		e.putBack(m)
	}
}

// outcomeKind classifies an outcome.
type outcomeKind uint8

const (
	outcomeConfirmed   outcomeKind = iota
	outcomeUnavailable             // the message is not blamed
	outcomeRefused                 // the message cannot be delivered
	outcomeInterrupted             // only the channel of the lane failed
	outcomeUnroutable              // no receiver: the message or its topic is at fault
	outcomeUnknown                 // an error of unknown kind
)

func classify(err error) outcomeKind {
	switch {
	case err == nil:
		return outcomeConfirmed
	case errors.Is(err, ErrUnroutable):
		return outcomeUnroutable
	case errors.Is(err, ErrRefused):
		return outcomeRefused
	case errors.Is(err, ErrInterrupted):
		return outcomeInterrupted
	case errors.Is(err, ErrUnavailable):
		return outcomeUnavailable
	default:
		return outcomeUnknown
	}
}
