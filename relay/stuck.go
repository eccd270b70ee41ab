package relay

import (
	"maps"
	"slices"
	"time"
)

const (
	otherTopicsEvery = time.Second
	otherTopicsCost  = 20     // at most one part in so many of the time
	otherTopicsRows  = 10_000 // of each lane in one look

	// retryingProbes is how many retrying messages of a stuck topic are kept to probe with.
	retryingProbes = 2
)

const (
	// maxUnclear and maxTopics bound the failed messages and the topics in trouble
	// that a worker keeps. Any more are retried later, without using up an attempt.
	maxUnclear      = 32
	maxUnclearBytes = 32 << 20
	maxTopics       = 64

	// retriesPerSecond is how many retrying messages may fail again in a second, for the
	// whole worker, and retriesAtOnce how many at once.
	retriesPerSecond = 100
	retriesAtOnce    = 256

	// aliveFor is how long a confirm proves that the sink works.
	aliveFor = 10 * time.Second
)

// relieve frees the payloads of a lane's messages that cannot be published now, except
// the first ones of each topic, which probe. If that is not enough for a while, it frees
// those of messages that wait behind others of their key: a large one would keep other keys
// from being read until its turn comes. Payloads needed again are read again. It reports
// whether that made room. One large message in flight takes none, nor do several that
// would fit.
func (e *engine) relieve(l *lane, now time.Time) bool {
	kept, probes := 0, map[string]int{}
	flying, largest := 0, 0
	for _, t := range e.circuits.topics {
		for _, m := range t.withheld {
			if m.lane != l || m.state != stateWithheld || m.hollow {
				continue
			}
			if probes[t.name]++; probes[t.name] > probesKept(m) {
				l.empty(m)
			} else {
				kept += m.size()
			}
		}
	}
	for _, m := range e.paused.withheld {
		if m.lane == l && m.state == stateWithheld {
			l.empty(m)
		}
	}
	for _, m := range l.entries {
		switch {
		case m.hollow || m.retrying:
		case m.state == stateFailed, m.state == stateFollower:
			l.empty(m)
		case m.state == stateUnclear:
			kept += m.size()
		case m.state == stateInFlight && m.size() > leastPiece:
			flying, largest = flying+m.size(), max(largest, m.size())
		case m.state == stateWaiting && l.stuckKey(m):
			l.empty(m)
		}
	}
	kept += max(largest, min(flying, e.limits.laneBytes))
	if l.bytes-kept >= e.limits.laneBytes && now.Sub(l.readBegan) >= thinAfter {
		l.thin(e.limits.laneBytes / 2)
	}
	return l.bytes-kept < e.limits.laneBytes
}

// thinAfter is how long a lane is not read before payloads are freed that will be sent soon. A
// backlog that moves makes room without, and its payloads would be read twice.
const thinAfter = 200 * time.Millisecond

// thin frees the payloads of messages that wait behind others of their key, the last ones,
// except for as many bytes.
func (l *lane) thin(keep int) {
	var chains []*chain
	for _, c := range l.chains {
		if c.length > 1 && !c.stuck() {
			chains = append(chains, c)
		}
	}
	for _, c := range chains {
		left := keep / len(chains)
		for m := c.head.next; m != nil; m = m.next {
			if m.state != stateWaiting || m.hollow || m.retrying {
				continue
			}
			if left -= m.size(); left < 0 {
				l.empty(m)
				l.thinned = true
			}
		}
	}
}

// thinned reports whether a message waits in a key that goes on, without its payload. Once it is its
// turn, the lane is read again. More of the key, read before, would be freed as well.
func (c *chain) thinned() bool {
	if c.length < 2 || c.stuck() {
		return false
	}
	for m := c.head.next; m != nil; m = m.next {
		if m.state == stateWaiting && m.hollow && !m.retrying {
			return true
		}
	}
	return false
}

// probesKept is how many messages of a stuck topic a lane keeps to probe with.
func probesKept(m *entry) int {
	if m.size() > 64<<10 {
		return 1
	}
	return retryingProbes
}

// stuckKey reports whether the key of m waits for a message that cannot be published now.
func (l *lane) stuckKey(m *entry) bool {
	c := l.chains[l.orderKey(m)]
	return c != nil && c.head != nil && c.head != m && c.stuck()
}

// stuck reports whether nothing of a key can be published now.
func (c *chain) stuck() bool {
	return c.retrying || c.stopped() || c.head != nil && (c.head.state == stateWithheld || c.head.state == stateUnclear)
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
// lane. If there are too many, those from the outbox are set aside: retried later.
// Retrying ones stay due in the table, except a few messages that probe: looks for due
// rows pass over the topic until it is available.

// able reports whether a lane may send what it holds, though maybe not at this moment.
func (l *lane) able(now time.Time) bool { return !l.halted() && !now.After(l.trusted) }

// halted reports whether a lane sends nothing until that changes.
func (l *lane) halted() bool { return l.draining || l.paused }

// leave forgets a withheld retrying message, unless keep is set, and those that follow
// it in its key. In the table they are due, or follow one that is.
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

// setAside moves messages of a lane whose topics are unavailable to those retrying,
// without using up an attempt, to make room for those of other topics. It reports
// whether it found any. While nothing at all is published this is not needed, unless
// the lane has something beyond its memory that was never tried.
func (e *engine) setAside(l *lane) bool {
	if !e.crammed(l) {
		return false
	}
	before := len(l.failing)
	for _, t := range e.circuits.topics {
		if !e.circuits.dispensable(t, l) {
			continue
		}
		t.withheld = slices.DeleteFunc(t.withheld, func(m *entry) bool {
			if m.state != stateWithheld || m.lane != l || m.retrying || len(l.failing)-before >= e.limits.laneRows {
				return m.state != stateWithheld
			}
			l.setAside(m, classUnavailable, "the topic is unavailable")
			return true
		})
	}
	e.setPausedAside(l, e.limits.laneRows-(len(l.failing)-before))
	if len(l.failing) == before {
		return false
	}
	l.stopFailing()
	return true
}

// crammed reports whether a topic in trouble may have filled a lane's memory.
func (e *engine) crammed(l *lane) bool {
	return !e.circuits.inOrder && (len(e.circuits.topics) > 0 || len(e.paused.withheld) > 0) && !l.draining &&
		(len(l.entries) >= maxEntries*e.limits.laneRows/2 || l.bytes >= e.limits.laneBytes)
}

// lookForOtherTopics looks for messages of topics of which nothing has been tried, in
// lanes whose memory is full of topics in trouble. Otherwise nobody would learn whether
// those pass: they are not tried before something is set aside to make room for them,
// which is useless if there are none.
func (e *engine) lookForOtherTopics(now time.Time) *task {
	if len(e.circuits.topics)+len(e.paused.withheld) == 0 || now.Before(e.tasks.otherTopicsAt) || !e.circuits.worthLooking() {
		return nil
	}
	numbers, lanes := e.numbers(func(l *lane) bool {
		return l.loaded && l.otherTopic == 0 && e.crammed(l) && (len(e.paused.withheld) == 0 || !e.dispensablePaused(l)) &&
			!slices.ContainsFunc(e.circuits.topics, func(t *topic) bool { return e.circuits.dispensable(t, l) })
	})
	e.tasks.otherTopicsAt = now.Add(otherTopicsEvery)
	if len(lanes) == 0 {
		return nil
	}
	tried := maps.Clone(e.paused.topics)
	if tried == nil {
		tried = map[string]bool{}
	}
	for _, t := range e.circuits.topics {
		tried[t.name] = true
	}
	for _, l := range lanes {
		for _, m := range l.entries {
			if m.state != stateWaiting && m.state != stateFollower {
				tried[m.Topic] = true
			}
		}
	}
	var found map[int]int64
	var took time.Duration
	return &task{
		again: &e.tasks.otherTopicsAt,
		do: func(ctx taskContext) (func(), error) {
			begin := ctx.clock()
			there, err := ctx.store.FindOtherTopics(ctx, numbers, slices.Sorted(maps.Keys(tried)), otherTopicsRows)
			lasted := ctx.clock().Sub(begin)
			return func() { found, took = there, lasted }, err
		},
		done: func(now time.Time) {
			e.tasks.otherTopicsAt = now.Add(max(otherTopicsEvery, otherTopicsCost*took))
			for _, l := range lanes {
				if e.live(l) {
					l.otherTopic = found[l.number]
				}
			}
		},
	}
}
