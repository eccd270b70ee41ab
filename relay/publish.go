package relay

import "time"

// publishing counts what is handed to the sink.
type publishing struct {
	inFlight int       // over all lanes
	sent     uint64    // publishes so far
	sentAt   time.Time // the last of them
	terms    uint64    // of pipelines, so far
	lane     int       // the lane to begin the next round with
}

// nextPublish returns messages of one lane to publish, in order, with their outcomes
// due at deadline, or nothing. A lane publishes only while its lease can be trusted for
// some time: the deadline is reached only if the lease is renewed.
func (e *engine) nextPublish(now, deadline time.Time) []*entry {
	if e.paused.unknown {
		return nil
	}
	if e.free(now) <= 0 {
		return nil
	}
	e.refetch()
	e.passTurn(now)
	if len(e.circuits.topics) > 0 {
		e.circuits.reachedAgain()
		e.circuits.abandon(now)
		if m := e.nextProbe(now); m != nil {
			return e.send([]*entry{m}, now, deadline)
		}
		e.circuits.release(now, func(m *entry) { m.lane.push(m) })
	}
	for range e.lanes {
		l := e.lanes[e.publishing.lane]
		e.publishing.lane = (e.publishing.lane + 1) % len(e.lanes)
		if l == nil || !e.mayPublish(l, now) {
			continue
		}
		if taken := e.take(l, min(e.free(now), e.limits.laneWindow-l.inFlight), now); len(taken) > 0 {
			return e.send(taken, now, deadline)
		}
	}
	return nil
}

// free returns how many messages may be sent. While the sink recovers, those in flight may stay without an
// answer for long, all of them: then one more is let out from time to time.
func (e *engine) free(now time.Time) int {
	room := e.limits.window
	if e.recovers() {
		room = e.circuits.room
		if at := e.trickleAt(); !at.IsZero() && !now.Before(at) {
			room = e.publishing.inFlight + 1
		}
	}
	return room - e.publishing.inFlight
}

// recovers reports whether the window is smaller than configured, since the sink was down.
func (e *engine) recovers() bool { return e.circuits.room > 0 && e.circuits.room < e.limits.window }

// trickleAt returns when one more message may be sent although there is no room: a second after the last
// publish or confirm. Zero: there is room, or the window is full.
func (e *engine) trickleAt() time.Time {
	if !e.recovers() || e.publishing.inFlight < e.circuits.room || e.publishing.inFlight >= e.limits.window {
		return time.Time{}
	}
	last := e.publishing.sentAt
	if e.circuits.passedAt.After(last) {
		last = e.circuits.passedAt
	}
	return last.Add(trickle)
}

func (e *engine) send(taken []*entry, now, deadline time.Time) []*entry {
	for _, m := range taken {
		e.publishing.sent++
		m.state, m.deadline, m.sent = stateInFlight, deadline, e.publishing.sent
		m.Term = m.lane.term
	}
	e.publishing.sentAt = now
	e.publishing.inFlight += len(taken)
	taken[0].lane.inFlight += len(taken)
	return taken
}

func (e *engine) mayPublish(l *lane, now time.Time) bool {
	return l.loaded && !l.halted() && !now.Add(e.limits.reserve).After(l.trusted) && !now.Before(l.retryAt) &&
		l.alone == nil && !l.mustClear && !l.restarting && l.inFlight < e.limits.laneWindow
}

// take returns up to most publishable entries of a lane. In a lane with crashes, an entry is
// announced first, and returned once the announcement is recorded.
func (e *engine) take(l *lane, most int, now time.Time) []*entry {
	if l.announced != nil {
		if !l.written || l.inFlight > 0 {
			return nil
		}
		return []*entry{e.isolation.sendAnnounced(l, now)}
	}
	if e.circuits.sinkDown || l.isolated() && l.proven(e.limits.window) {
		return nil
	}
	var taken []*entry
	for len(taken) < most {
		m := l.ready.next()
		if m != nil && e.paused.on(m) {
			if e.circuits.inOrder {
				break
			}
			l.ready.drop()
			e.withholdPaused(m)
			continue
		}
		if m == nil || e.ahead.holds(m, now) {
			break
		}
		record := m.needsRecord()
		waits := record && (len(taken) > 0 || l.inFlight > 0 || !e.isolation.hasTurn(m)) || l.together && !e.mayKeepTurn(l, now)
		if waits && !m.hollow { // what cannot be sent waits for no turn: none is offered for it
			break
		}
		if !e.circuits.admits(m) {
			if e.circuits.inOrder {
				break
			}
			l.ready.drop()
			e.circuits.withhold(m)
			continue
		}
		if m.hollow {
			l.refetch = true
			break
		}
		l.ready.drop()
		if record {
			e.isolation.announce(m, now)
			break
		}
		if l.together {
			l.sentInTurn++
		}
		m.state = stateInFlight // prevents taking it twice
		taken = append(taken, m)
	}
	return taken
}
