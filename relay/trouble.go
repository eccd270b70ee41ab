package relay

import (
	"slices"
	"time"
)

// alive reports whether the sink works, so that a failure is not the sink's. An answer
// about one message comes from a broker that is there.
func (c *circuits) alive(now time.Time, kind outcomeKind) bool {
	switch {
	case c.reachable != nil:
		return c.reachable()
	case kind == outcomeUnroutable:
		return true
	}
	return !c.sinkDown && !c.passedAt.IsZero() && now.Sub(c.passedAt) < aliveFor
}

// overfull reports whether too many topics are in trouble.
func (c *circuits) overfull(now time.Time, kind outcomeKind) bool {
	return !c.inOrder && len(c.topics) > c.mostTopics && c.alive(now, kind)
}

// tooManyUnclear reports whether memory holds too many unclear messages, or too many of their
// bytes.
func (c *circuits) tooManyUnclear(now time.Time, kind outcomeKind) bool {
	if c.inOrder || !c.alive(now, kind) {
		return false
	}
	n, bytes := 0, 0
	for _, t := range c.topics {
		for _, m := range t.unclear {
			n++
			bytes += m.size()
		}
	}
	return n > c.mostUnclear || bytes > maxUnclearBytes
}

// leave removes a message from its topic's circuit, and drops the circuit if
// nothing else is left in it.
func (c *circuits) leave(m *entry) {
	t := c.find(m.Topic)
	if t == nil {
		return
	}
	t.settle(m)
	if t.state == circuitOpen && t.probe == nil && len(t.withheld) == 0 && len(c.topics) > c.mostTopics {
		c.drop(t)
		return
	}
	c.forget(t)
}

// hollowTopics returns the topics whose payloads reads do not need: they are paused; or they
// are stuck, and memory holds their probes.
func (e *engine) hollowTopics(now time.Time) (names []string) {
	c := &e.circuits
	if c.inOrder {
		return nil
	}
	names = e.paused.passOver(nil)
	for _, t := range c.topics {
		if t.state == circuitOpen && (t.probe != nil || e.hasProbe(t, now)) {
			names = append(names, t.name)
		}
	}
	return names
}

// hasProbe reports whether memory holds a message of the topic, with its payload, that can probe, though
// maybe not at this moment. One that must be alone cannot while its lane goes on with others.
func (e *engine) hasProbe(t *topic, now time.Time) bool {
	return slices.ContainsFunc(t.withheld, func(m *entry) bool {
		return m.state == stateWithheld && !m.hollow && m.lane.able(now) && !e.paused.on(m) &&
			(!m.crashed || m.lane.isolated() || m.lane.inFlight == 0)
	})
}

// stuck reports whether a topic is unavailable and has a message to probe with.
func (c *circuits) stuck(t *topic, now time.Time) bool {
	return !c.inOrder && t != nil && t.state == circuitOpen &&
		(t.probe != nil || slices.ContainsFunc(t.withheld, func(m *entry) bool { return m.state == stateWithheld && m.lane.able(now) }))
}

// passOver returns the topics that are stuck.
func (c *circuits) passOver(now time.Time) (names []string) {
	for _, t := range c.topics {
		if c.stuck(t, now) {
			t.moreDue = true
			names = append(names, t.name)
		}
	}
	return names
}

// leaveRetrying forgets retrying messages that circuits withhold, except a few to probe
// with and nothing that is behind those.
func (c *circuits) leaveRetrying(now time.Time) {
	for _, t := range c.topics {
		if t.state != circuitOpen {
			continue
		}
		kept := 0
		t.withheld = slices.DeleteFunc(t.withheld, func(m *entry) bool {
			if m.state != stateWithheld || !m.retrying {
				return m.state != stateWithheld
			}
			keep := kept < retryingProbes && m.lane.able(now)
			if keep {
				kept++
			}
			m.lane.leave(m, keep)
			return !keep
		})
	}
}

// dispensable reports whether messages of a topic make room in a lane for others.
func (c *circuits) dispensable(t *topic, l *lane) bool {
	return t.state == circuitOpen && (!c.sinkDown && c.passed > t.openedAt || l.otherTopic > 0 && c.worthLooking())
}

// worthLooking reports whether the broker may take messages of other topics.
func (c *circuits) worthLooking() bool {
	if c.reachable != nil {
		return c.reachable()
	}
	return !c.sinkDown
}
