package relay

import (
	"slices"
	"time"
)

// nextProbe returns a message that probes whether its topic's circuit, or the sink's,
// may close.
func (e *engine) nextProbe(now time.Time) *entry {
	if e.circuits.sinkDown {
		return e.nextSinkProbe(now)
	}
	for _, t := range e.circuits.topics {
		if now.Before(t.retryAt) {
			continue
		}
		if t.state == circuitOpen && t.probe == nil {
			if m := e.candidate(t, now); m != nil {
				t.probe, t.probedAt = m, now
				return e.announced(m, now)
			}
			if e.circuits.inOrder { // its lanes may be paused or lost
				t.retryAt = now.Add(lookAgain)
			}
		}
		if m := e.loneUnclear(t, now); m != nil {
			return e.announced(m, now)
		}
	}
	return nil
}

// nextSinkProbe returns a message that probes whether the sink is back: one of a topic
// without trouble and one of each topic in trouble, in turn.
func (e *engine) nextSinkProbe(now time.Time) *entry {
	if e.circuits.sinkProbe != nil || now.Before(e.circuits.sinkRetryAt) {
		return nil
	}
	ways := []func(now time.Time) *entry{e.openedProbe, e.freshProbe}
	if e.circuits.sinkTurn {
		slices.Reverse(ways)
	}
	for _, way := range ways {
		if m := way(now); m != nil {
			e.circuits.sinkProbe, e.circuits.sinkProbed = m, now
			return e.announced(m, now)
		}
	}
	for _, t := range e.circuits.topics {
		if m := e.loneUnclear(t, now); m != nil { // nothing else is left to probe with
			e.circuits.sinkProbe, e.circuits.sinkProbed = m, now
			return e.announced(m, now)
		}
	}
	e.circuits.sinkRetryAt = now.Add(lookAgain) // what could probe may be paused
	return nil
}

func (e *engine) openedProbe(now time.Time) *entry {
	for _, t := range e.circuits.topics {
		if t.state != circuitOpen || t.probe != nil {
			continue
		}
		if m := e.candidate(t, now); m != nil {
			t.probe, t.probedAt = m, now
			return m
		}
	}
	return nil
}

// freshProbe prefers lanes that wait for no outcome: what holds up another's may hold up the
// probe too.
func (e *engine) freshProbe(now time.Time) *entry {
	if m := e.freshProbeOf(now, func(l *lane) bool { return l.inFlight == 0 }); m != nil {
		return m
	}
	return e.freshProbeOf(now, func(l *lane) bool { return l.inFlight > 0 })
}

func (e *engine) freshProbeOf(now time.Time, fits func(*lane) bool) *entry {
	for _, l := range e.lanes {
		if l == nil || !fits(l) || !e.mayPublish(l, now) || l.announced != nil {
			continue
		}
		for m := l.ready.next(); m != nil; m = l.ready.next() {
			if e.paused.on(m) {
				if e.circuits.inOrder {
					break
				}
				l.ready.drop()
				e.withholdPaused(m)
				continue
			}
			if t := e.circuits.find(m.Topic); !e.circuits.inOrder && t != nil && t.state == circuitOpen {
				l.ready.drop()
				e.circuits.withhold(m)
				continue
			}
			if m.hollow {
				l.refetch = true
				break
			}
			if !e.probesInTurn(m, now) {
				break
			}
			l.ready.drop()
			return m
		}
	}
	return nil
}

// loneUnclear returns the one unclear message of a topic, if it may be retried.
func (e *engine) loneUnclear(t *topic, now time.Time) *entry {
	if t.state == circuitOpen || len(t.unclear) != 1 {
		return nil
	}
	m := t.unclear[0]
	if m.state != stateUnclear || e.paused.on(m) || !e.mayPublish(m.lane, now) || m.lane.announced != nil || !e.probesInTurn(m, now) {
		return nil
	}
	return m
}

// candidate returns a message of a topic that may probe: the withheld one that has
// waited longest, or the first of a lane that is one pipeline.
func (e *engine) candidate(t *topic, now time.Time) *entry {
	for i, m := range t.withheld {
		if e.mayProbe(m, now) && m.lane.announced == nil && e.probesInTurn(m, now) {
			t.withheld = slices.Delete(t.withheld, i, i+1)
			return m
		}
	}
	if !e.circuits.inOrder {
		e.refetchProbe(t, now)
		return nil
	}
	for _, l := range e.lanes {
		if l == nil || !e.mayPublish(l, now) || l.announced != nil || l.inFlight > 0 {
			continue
		}
		if m := l.ready.next(); m != nil && m.Topic == t.name && !m.hollow && !e.paused.on(m) && e.probesInTurn(m, now) {
			l.ready.drop()
			return m
		}
	}
	return nil
}

// mayProbe reports whether a withheld message may probe, if its lane has the turn or needs none.
func (e *engine) mayProbe(m *entry, now time.Time) bool {
	return m.state == stateWithheld && !m.hollow && !e.paused.on(m) && e.mayPublish(m.lane, now)
}

// refetchProbe reads again a message that could probe if it had its payload. If one that has it waits,
// say for its turn, reads would bring no other; see hollowTopics.
func (e *engine) refetchProbe(t *topic, now time.Time) {
	if e.hasProbe(t, now) {
		return
	}
	for _, m := range t.withheld {
		if m.state == stateWithheld && m.hollow && !e.paused.on(m) && e.mayPublish(m.lane, now) && m.lane.announced == nil {
			m.lane.refetch = true
			return
		}
	}
}

// probesInTurn reports whether m may probe now, if it needs a turn. What is recorded as about to be
// in flight must not be so beside others of its lane. And a turn must end: where a topic never
// answers, one probe follows another.
func (e *engine) probesInTurn(m *entry, now time.Time) bool {
	switch {
	case !e.isolation.hasTurn(m):
		return false
	case m.needsRecord():
		return m.lane.inFlight == 0
	}
	return !m.lane.together || e.mayKeepTurn(m.lane, now)
}

// probing returns messages that could probe if their lanes, which had crashes, had the turn. These may
// have nothing else to send, and the topics nothing else that would pass.
func (e *engine) probing(now time.Time) (probes []*entry) {
	c := &e.circuits
	if c.inOrder || !slices.ContainsFunc(e.lanes[:], func(l *lane) bool { return l != nil && l.isolated() }) {
		return nil
	}
	inTurn := func(m *entry) bool { return m.needsTurn() && m.lane.inFlight == 0 }
	for _, t := range c.topics {
		due := !now.Before(t.retryAt)
		if c.sinkDown {
			due = c.sinkProbe == nil && !now.Before(c.sinkRetryAt)
		}
		switch {
		case !due || t.state == circuitOpen && t.probe != nil:
		case t.state != circuitOpen:
			if len(t.unclear) == 1 {
				if m := t.unclear[0]; m.state == stateUnclear && !e.paused.on(m) && e.mayPublish(m.lane, now) && inTurn(m) {
					probes = append(probes, m)
				}
			}
		default:
			if n := slices.IndexFunc(t.withheld, func(m *entry) bool { return inTurn(m) && e.mayProbe(m, now) }); n >= 0 {
				probes = append(probes, t.withheld[n])
			}
		}
	}
	return probes
}

// announced returns m, unless it has to be announced first.
func (e *engine) announced(m *entry, now time.Time) *entry {
	if m.needsRecord() {
		e.isolation.announce(m, now)
		return nil
	}
	if m.lane.together {
		m.lane.sentInTurn++
	}
	return m
}
