package relay

import (
	"maps"
	"slices"
	"time"
)

const (
	beyondEvery = time.Second
	beyondCost  = 20     // at most one part in so many of the time
	beyondRows  = 10_000 // of each lane in one look

	// parkedProbes is how many parked rows of a stuck topic are kept to probe with.
	parkedProbes = 2
)

const (
	// maxSuspects and maxTopics bound the failed messages and the topics in trouble
	// that a worker keeps. Any more wait in parked, at no charge.
	maxSuspects     = 32
	maxSuspectBytes = 32 << 20
	maxTopics       = 64

	// wastedPerSecond is how many parked messages may fail again in a second, for the
	// whole worker, and wastedAtOnce how many at once.
	wastedPerSecond = 100
	wastedAtOnce    = 256

	// aliveFor is how long a confirm proves that the sink works.
	aliveFor = 10 * time.Second
)

// waste counts a parked message that has failed again.
func (e *engine) waste(now time.Time) {
	e.allowance(now)
	e.tokens = max(e.tokens-1, -wastedAtOnce) // a lost connection fails very many at once
}

// allowance returns how many parked messages may be tried now.
func (e *engine) allowance(now time.Time) int {
	if !e.tokensAt.IsZero() {
		e.tokens += now.Sub(e.tokensAt).Seconds() * wastedPerSecond
	} else {
		e.tokens = wastedAtOnce
	}
	e.tokens, e.tokensAt = min(e.tokens, wastedAtOnce), now
	return int(max(0, e.tokens))
}

// alive reports whether the sink works, so that a failure is not the sink's. An answer
// about one message comes from a broker that is there.
func (e *engine) alive(now time.Time, kind outcomeKind) bool {
	switch {
	case e.reachable != nil:
		return e.reachable()
	case kind == unroutableOutcome:
		return true
	}
	return !e.sinkDown && !e.passedAt.IsZero() && now.Sub(e.passedAt) < aliveFor
}

// overfull reports whether too many topics are in trouble.
func (e *engine) overfull(now time.Time, kind outcomeKind) bool {
	return !e.inOrder && len(e.topics) > e.mostTopics && e.alive(now, kind)
}

// tooManySuspects reports whether memory holds too many suspects, or too many of their
// bytes.
func (e *engine) tooManySuspects(now time.Time, kind outcomeKind) bool {
	if e.inOrder || !e.alive(now, kind) {
		return false
	}
	n, bytes := 0, 0
	for _, t := range e.topics {
		for _, m := range t.suspects {
			n++
			bytes += m.size()
		}
	}
	return n > e.mostSuspects || bytes > maxSuspectBytes
}

// leaveTopic removes a message from its topic's circuit, and drops the circuit if
// nothing else is left in it.
func (e *engine) leaveTopic(m *entry) {
	t := e.find(m.Topic)
	if t == nil {
		return
	}
	t.unsuspect(m)
	if t.state == opened && t.probe == nil && len(t.withheld) == 0 && len(e.topics) > e.mostTopics {
		e.circuits.drop(t)
		return
	}
	e.forget(t)
}

// relieve frees the payloads of a lane's messages that cannot go out now, except the
// first ones of each topic, which probe. Payloads needed again are read again. It
// reports whether that made room.
func (e *engine) relieve(l *lane) bool {
	kept, probes := 0, map[string]int{}
	for _, t := range e.topics {
		for _, m := range t.withheld {
			if m.lane != l || m.state != withheld || m.hollow {
				continue
			}
			if probes[t.name]++; probes[t.name] > probesKept(m) {
				l.empty(m)
			} else {
				kept += m.size()
			}
		}
	}
	for _, m := range l.entries {
		switch {
		case m.hollow || m.parked:
		case m.state == charged, m.state == follower:
			l.empty(m)
		case m.state == suspected:
			kept += m.size()
		case m.state == waiting && l.stuckKey(m):
			l.empty(m)
		}
	}
	return l.bytes-kept < e.laneBytes
}

// hollowTopics returns the topics whose payloads reads do not need: they are stuck, and
// memory holds their probes.
func (e *engine) hollowTopics(now time.Time) (names []string) {
	if e.inOrder {
		return nil
	}
	for _, t := range e.topics {
		whole := func(m *entry) bool { return m.state == withheld && !m.hollow && m.lane.able(now) }
		if t.state == opened && (t.probe != nil || slices.ContainsFunc(t.withheld, whole)) {
			names = append(names, t.name)
		}
	}
	return names
}

// probesKept is how many messages of a stuck topic a lane keeps to probe with.
func probesKept(m *entry) int {
	if m.size() > 64<<10 {
		return 1
	}
	return parkedProbes
}

// stuckKey reports whether the key of m waits for a message that cannot go out now.
func (l *lane) stuckKey(m *entry) bool {
	c := l.chains[l.orderKey(m)]
	return c != nil && c.head != nil && c.head != m && c.stuck()
}

// stuck reports whether nothing of a key can go out now.
func (c *chain) stuck() bool {
	return c.parked || c.stopped() || c.head != nil && (c.head.state == withheld || c.head.state == suspected)
}

// refetch makes lanes forget their unsent entries if one of these lacks its payload and
// is needed now. They are read again, in order.
func (e *engine) refetch() {
	for _, l := range e.lanes {
		if l == nil || !l.refetch {
			continue
		}
		l.refetch, l.refetched = false, l.reading
		l.forgetUnsent()
		e.purge(func(m *entry) bool { return m.lane == l && l.entries[m.rowID()] != m })
	}
}

// Messages of an unavailable topic must not exclude others from the memory of their
// lane. Those from the outbox are set aside in parked if there are too many. Parked
// ones are left there, due, except a few messages that probe: looks for due rows pass
// over the topic until it is available.

// stuck reports whether a topic is unavailable and has a message to probe with.
func (e *engine) stuck(t *topic, now time.Time) bool {
	return !e.inOrder && t != nil && t.state == opened &&
		(t.probe != nil || slices.ContainsFunc(t.withheld, func(m *entry) bool { return m.state == withheld && m.lane.able(now) }))
}

// able reports whether a lane may send what it holds, though maybe not at this moment.
func (l *lane) able(now time.Time) bool { return !l.draining && !now.After(l.trusted) }

// passOver returns the topics that are stuck.
func (e *engine) passOver(now time.Time) (names []string) {
	for _, t := range e.topics {
		if e.stuck(t, now) {
			t.parked = true
			names = append(names, t.name)
		}
	}
	return names
}

// leaveParked forgets parked messages that circuits withhold, except a few to probe
// with and nothing that is behind those.
func (e *engine) leaveParked(now time.Time) {
	for _, t := range e.topics {
		if t.state != opened {
			continue
		}
		kept := 0
		t.withheld = slices.DeleteFunc(t.withheld, func(m *entry) bool {
			if m.state != withheld || !m.parked {
				return m.state != withheld
			}
			keep := kept < parkedProbes && m.lane.able(now)
			if keep {
				kept++
			}
			m.lane.leave(m, keep)
			return !keep
		})
	}
}

// leave forgets a withheld parked row, unless keep is set, and those that follow it in
// its key. In the table they are due, or follow one that is.
func (l *lane) leave(m *entry, keep bool) {
	left := m
	if key := l.orderKey(m); key != "" {
		c := l.chains[key] // m is its head
		c.head, c.tail, c.length = nil, nil, 0
		if keep {
			left = m.next
			m.next = nil
			c.insert(m)
		}
	} else if keep {
		return
	}
	for left != nil {
		next := left.next
		left.next = nil
		l.forget(left)
		left = next
	}
}

// setAside moves messages of a lane whose topics are unavailable to parked, at no
// charge, to make room for those of other topics. It reports whether it found any.
// While nothing at all goes out this is not needed, unless the lane has something
// beyond its memory that was never tried.
func (e *engine) setAside(l *lane) bool {
	if !e.crammed(l) {
		return false
	}
	before := len(l.failing)
	for _, t := range e.topics {
		if !e.dispensable(t, l) {
			continue
		}
		t.withheld = slices.DeleteFunc(t.withheld, func(m *entry) bool {
			if m.state != withheld || m.lane != l || m.parked || len(l.failing)-before >= e.laneRows {
				return m.state != withheld
			}
			m.state, m.failure = charged, &failure{
				Ref: m.ref(), free: true, unanswered: m.unanswered, class: classUnavailable, text: "the topic is unavailable", verdict: retryLater,
			}
			l.failing = append(l.failing, m)
			if key := l.orderKey(m); key != "" {
				l.chain(key).failing = m
			}
			return true
		})
	}
	if len(l.failing) == before {
		return false
	}
	l.stopFailing()
	return true
}

// crammed reports whether a topic in trouble may have filled a lane's memory.
func (e *engine) crammed(l *lane) bool {
	return !e.inOrder && len(e.topics) > 0 && !l.draining &&
		(len(l.entries) >= maxEntries*e.laneRows/2 || l.bytes >= e.laneBytes)
}

// dispensable reports whether messages of a topic make room in a lane for others.
func (e *engine) dispensable(t *topic, l *lane) bool {
	return t.state == opened && (!e.sinkDown && e.passed > t.openedAt || l.beyond > 0 && e.worthLooking())
}

// worthLooking reports whether the broker may take messages of other topics.
func (e *engine) worthLooking() bool {
	if e.reachable != nil {
		return e.reachable()
	}
	return !e.sinkDown
}

// lookBeyond looks for messages of topics of which nothing has been tried, in lanes
// whose memory is full of topics in trouble. Otherwise nobody would learn whether those
// pass: they are not tried before something is set aside to make room for them, which
// is useless if there are none.
func (e *engine) lookBeyond(now time.Time) *chore {
	if len(e.topics) == 0 || now.Before(e.beyondAt) || !e.worthLooking() {
		return nil
	}
	numbers, lanes := e.numbers(func(l *lane) bool {
		return l.loaded && l.beyond == 0 && e.crammed(l) &&
			!slices.ContainsFunc(e.topics, func(t *topic) bool { return e.dispensable(t, l) })
	})
	e.beyondAt = now.Add(beyondEvery)
	if len(lanes) == 0 {
		return nil
	}
	tried := map[string]bool{}
	for _, t := range e.topics {
		tried[t.name] = true
	}
	for _, l := range lanes {
		for _, m := range l.entries {
			if m.state != waiting && m.state != follower {
				tried[m.Topic] = true
			}
		}
	}
	var found map[int]int64
	var took time.Duration
	return &chore{
		again: &e.beyondAt,
		do: func(ctx choreContext) (func(), error) {
			begin := ctx.clock()
			there, err := ctx.store.beyond(ctx, numbers, slices.Sorted(maps.Keys(tried)), beyondRows)
			lasted := ctx.clock().Sub(begin)
			return func() { found, took = there, lasted }, err
		},
		done: func(now time.Time) {
			e.beyondAt = now.Add(max(beyondEvery, beyondCost*took))
			for _, l := range lanes {
				if e.live(l) {
					l.beyond = found[l.number]
				}
			}
		},
	}
}
