package relay

import (
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// pauses is what operators have paused, of what concerns relays; see package steer.
type pauses struct {
	topics, sinks, keys map[string]bool
	lanes               [outbox.Lanes]bool
}

func (p *pauses) equal(o *pauses) bool {
	return maps.Equal(p.topics, o.topics) && maps.Equal(p.sinks, o.sinks) && maps.Equal(p.keys, o.keys) && p.lanes == o.lanes
}

// paused keeps messages of what is paused from the sink. Such a message is withheld as by a
// circuit that an operator has opened: no probe, no attempt, and its key waits behind it. It is
// in no topic's circuit, so that the circuits know only topics in trouble.
//
// A pause concerns what is taken from then on. Messages in flight get their outcome.
type paused struct {
	unknown bool   // nothing is published before the pauses are known
	any     bool   // of topics, sinks or keys
	now     pauses // what is paused
	sinkOf  func(topic string) string

	withheld []*entry
	topics   map[string]bool // those of topics, and those met of sinks: statements pass them over
	sent     uint64          // the number of the last publish before the pauses last changed
	passed   uint64          // and of the latest that was confirmed
}

// mostPausedTopics bounds the topics that statements pass over. Retrying messages of further
// topics of a paused sink are read, and forgotten.
const mostPausedTopics = 4096

// sinkAll is the name of the sink of a relay that has no router.
const sinkAll = "#"

// on reports whether a message is paused by its topic, its sink or its key. Lanes know it
// themselves.
func (p *paused) on(m *entry) bool {
	return p.any && (p.topic(m.Topic) || m.Key != "" && p.now.keys[m.Key])
}

func (p *paused) topic(name string) bool {
	if p.now.topics[name] {
		return true
	}
	if len(p.now.sinks) == 0 {
		return false
	}
	if p.sinkOf == nil {
		return p.now.sinks[sinkAll]
	}
	return p.now.sinks[p.sinkOf(name)]
}

// passOver appends the topics that are paused, as far as they are known.
func (p *paused) passOver(names []string) []string {
	for name := range p.topics {
		names = append(names, name)
	}
	return names
}

// pause takes over what operators have paused now.
func (e *engine) pause(to pauses, now time.Time) {
	p := &e.paused
	p.unknown, p.now, p.sent = false, to, e.publishing.sent
	p.any = len(to.topics)+len(to.sinks)+len(to.keys) > 0
	if p.topics == nil {
		p.topics = map[string]bool{}
	}
	maps.DeleteFunc(p.topics, func(name string, _ bool) bool { return !p.topic(name) })
	maps.Copy(p.topics, to.topics)
	for number, l := range e.lanes {
		if l == nil {
			continue
		}
		l.paused = to.lanes[number]
		if m := l.announced; m != nil && (l.paused || p.on(m)) {
			e.takeBack(m)
		}
	}
	e.gatherPaused()
	e.resumePaused()
	e.due.lookFromStart(now)
}

// takeBack makes a message ready again that was announced, and is not to be sent now.
func (e *engine) takeBack(m *entry) {
	l := m.lane
	l.cancel()
	e.circuits.unrelated(m)
	if c := l.chains[l.orderKey(m)]; m.state != stateWaiting || c != nil && c.stopped() {
		return
	}
	m.state = stateReady
	l.ready.pushFirst(m)
}

// gatherPaused withholds messages that are paused and belong to a circuit: they would be its
// probes, or be blamed by what happens to others.
func (e *engine) gatherPaused() {
	if !e.paused.any || e.circuits.inOrder {
		return
	}
	var found []*entry
	for _, t := range slices.Clone(e.circuits.topics) {
		of := func(state state) func(*entry) bool {
			return func(m *entry) bool {
				if m.state != state || !e.paused.on(m) {
					return false
				}
				found = append(found, m)
				return true
			}
		}
		t.withheld = slices.DeleteFunc(t.withheld, of(stateWithheld))
		t.unclear = slices.DeleteFunc(t.unclear, of(stateUnclear))
		e.circuits.forget(t)
	}
	for _, m := range found {
		m.failedAt = 0
		e.withholdPaused(m)
	}
}

// withholdPaused keeps a message until what has paused it is resumed. Retrying ones stay in
// their table: looks for what is due pass over a topic, but not over a key, so the first
// message of that is kept, without its payload.
func (e *engine) withholdPaused(m *entry) {
	l, p := m.lane, &e.paused
	l.waited++
	if m.retrying {
		if p.topic(m.Topic) {
			if len(p.topics) < mostPausedTopics {
				p.topics[m.Topic] = true
			}
			l.leave(m, false)
			return
		}
		l.leave(m, true)
		l.empty(m)
	} else if len(p.topics) < mostPausedTopics && p.topic(m.Topic) {
		p.topics[m.Topic] = true
	}
	m.state = stateWithheld
	p.withheld = append(p.withheld, m)
}

// resumePaused makes ready what is no longer paused.
func (e *engine) resumePaused() {
	var ready []*entry
	e.paused.withheld = slices.DeleteFunc(e.paused.withheld, func(m *entry) bool {
		if m.state == stateWithheld && !e.paused.on(m) {
			ready = append(ready, m)
		}
		return m.state != stateWithheld || !e.paused.on(m)
	})
	for _, m := range ready {
		switch {
		case m.state != stateWithheld: // it was there twice
		case m.retrying && m.hollow:
			m.lane.leave(m, false) // it is read again
		default:
			m.lane.push(m)
		}
	}
}

// dispensablePaused reports whether paused messages make room in a lane for others. As long as
// nothing else is published, they need not.
func (e *engine) dispensablePaused(l *lane) bool {
	c := &e.circuits
	return !c.sinkDown && e.paused.passed > e.paused.sent || l.otherTopic > 0 && c.worthLooking()
}

// setPausedAside moves paused messages of a lane to those retrying, as setAside does with those
// of topics that are unavailable.
func (e *engine) setPausedAside(l *lane, most int) {
	if len(e.paused.withheld) == 0 || !e.dispensablePaused(l) {
		return
	}
	moved := 0
	e.paused.withheld = slices.DeleteFunc(e.paused.withheld, func(m *entry) bool {
		if m.state != stateWithheld || m.lane != l || m.retrying || moved >= most {
			return m.state != stateWithheld
		}
		moved++
		l.setAside(m, classPaused, "paused by an operator")
		return true
	})
}

// setAside has a withheld message moved to those retrying, without using up an attempt.
func (l *lane) setAside(m *entry, class, text string) {
	m.state, m.failure = stateFailed, &relaystore.Failure{
		Ref: m.ref(), Uncharged: true, Unanswered: m.unanswered, Class: class, Text: text, Fate: relaystore.FateRetry,
	}
	l.failing = append(l.failing, m)
	if key := l.orderKey(m); key != "" {
		l.chain(key).failing = m
	}
}

// purge makes circuits and pauses drop messages that are gone.
func (e *engine) purge(gone func(*entry) bool) {
	e.circuits.purge(gone)
	e.paused.withheld = slices.DeleteFunc(e.paused.withheld, gone)
}
