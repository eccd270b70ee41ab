package relay

import (
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// circuitState is how a topic in trouble is handled.
type circuitState uint8

const (
	circuitClosed   circuitState = iota // a message failed, perhaps by its own fault; the others are published
	circuitOpen                         // only one probe after another is published
	circuitHalfOpen                     // each confirm lets some more out
)

// topic is the circuit of one topic that has had trouble. Other topics have none.
type topic struct {
	name      string
	state     circuitState
	openedAt  uint64 // number of the last publish before
	retry     backoff.BackOff
	retryAt   time.Time
	probe     *entry    // in flight, while open
	probedAt  time.Time // when it became the probe
	withheld  []*entry  // would be ready without the circuit
	credit    int       // how many may be published, while half-open
	refetchAt time.Time // when lanes that are busy may be read again for it
	unclear   []*entry  // failed through their own fault or the topic's
	passed    uint64    // the latest publish of this topic that was confirmed
	moreDue   bool      // retrying messages of it may be due
}

// circuits separate faults of a message from faults of its topic or of the sink.
//
// An unavailable outcome opens the circuit of its topic. If two are open and nothing
// has passed since the first of them opened, the sink is at fault: then one message at
// a time probes for all.
//
// An outcome may be unclear: unroutable, or an error of unknown kind. The next messages
// of the topic then decide. If one passes, the unclear message is refused. If one fails
// as unclearly, the circuit opens, and no attempts are used up. A lone unclear message
// is retried until there is an answer.
type circuits struct {
	inOrder bool // a lane is one pipeline: what waits, waits in its lane
	enough  int  // the credit at which a topic has recovered
	jitter  draw

	mostTopics  int         // in trouble, kept in memory while the sink works
	mostUnclear int         // kept in memory
	reachable   func() bool // whether the sink reaches its broker; nil: it cannot report it
	away        bool        // it did not, when last asked

	topics   []*topic // in trouble; who probes next comes first
	byName   map[string]*topic
	passed   uint64    // the latest publish that was confirmed
	passedAt time.Time // when the latest confirm came

	// changed is called when a topic becomes unavailable, and when it is available
	// again (a nil cause); it may be nil.
	changed func(topic string, cause error)

	// becameUnclear is called when a message becomes unclear, and when it has passed
	// after all (a nil cause); it may be nil.
	becameUnclear func(m *entry, cause error)

	sinkDown    bool
	sinkRetry   backoff.BackOff
	sinkRetryAt time.Time
	sinkProbe   *entry
	sinkProbed  time.Time // when it became the probe
	sinkTurn    bool      // the next probe is of a topic without trouble, if there is one
	room        int       // the window while the sink recovers; 0: as configured
}

// find returns the circuit of a topic, nil if it has no trouble.
func (c *circuits) find(name string) *topic {
	return c.byName[name]
}

func (c *circuits) findOrAdd(name string) *topic {
	t := c.find(name)
	if t == nil {
		t = &topic{name: name, retry: drawnBackOff(c.jitter)}
		if c.byName == nil {
			c.byName = map[string]*topic{}
		}
		c.topics, c.byName[name] = append(c.topics, t), t
	}
	return t
}

// admits reports whether a message may be published now, and consumes the permission.
func (c *circuits) admits(m *entry) bool {
	if len(c.topics) == 0 {
		return true
	}
	t := c.find(m.Topic)
	switch {
	case m.released:
		m.released = false
		return t == nil || t.state != circuitOpen
	case t == nil || t.state == circuitClosed:
		return true
	case t.state == circuitOpen || t.credit == 0 || len(t.withheld) > 0:
		return false
	}
	t.credit--
	return true
}

// withhold keeps a message until its topic's circuit releases it.
func (c *circuits) withhold(m *entry) {
	t := c.findOrAdd(m.Topic)
	m.state = stateWithheld
	m.lane.waited++
	t.withheld = append(t.withheld, m)
}

// unavailable handles an unavailable outcome of a message.
func (c *circuits) unavailable(m *entry, sent uint64, now time.Time, cause error) {
	t := c.findOrAdd(m.Topic)
	t.settle(m)
	c.probed(t, m, now)
	if t.state != circuitOpen {
		c.open(t, sent, now, cause)
	}
}

// probed ends a probe that failed.
func (c *circuits) probed(t *topic, m *entry, now time.Time) {
	if t.probe == m {
		t.probe = nil
		t.retryAt = now.Add(t.retry.NextBackOff())
	}
	if c.sinkProbe == m {
		c.sinkProbe = nil
		c.sinkRetryAt = now.Add(c.sinkRetry.NextBackOff())
		c.sinkTurn = !c.sinkTurn
		// It may be the trouble of this topic alone: the next one has its turn.
		c.topics = append(slices.DeleteFunc(c.topics, func(o *topic) bool { return o == t }), t)
	}
}

// open opens a circuit. Its unclear messages are settled, since the topic is at fault.
func (c *circuits) open(t *topic, sent uint64, now time.Time, cause error) {
	if t.state != circuitHalfOpen && c.changed != nil {
		c.changed(t.name, cause)
	}
	t.state, t.openedAt, t.credit, t.probe = circuitOpen, sent, 0, nil
	t.retryAt = now.Add(t.retry.NextBackOff())
	for _, m := range t.unclear {
		if m.state == stateUnclear && !c.inOrder {
			m.state = stateWithheld
			t.withheld = append(t.withheld, m)
		}
	}
	t.unclear = nil
	if c.sinkDown {
		return
	}
	for _, other := range c.topics {
		if other != t && other.state == circuitOpen && c.passed <= other.openedAt {
			c.sinkDown, c.sinkProbe, c.sinkTurn = true, nil, true
			c.sinkRetry = drawnBackOff(c.jitter)
			c.sinkRetryAt = now.Add(c.sinkRetry.NextBackOff())
			return
		}
	}
}

// unclear handles an outcome that may be the fault of the message or of its topic, and
// reports whether the message is known to be at fault.
func (c *circuits) unclear(m *entry, sent uint64, now time.Time, cause error) (blamed bool) {
	t := c.findOrAdd(m.Topic)
	c.probed(t, m, now)
	switch {
	case t.state == circuitOpen:
		t.settle(m)
		return false
	case m.failedAt > 0 && t.passed > m.failedAt,
		m.failedAt > 0 && c.passed > m.failedAt && now.Sub(m.unclearSince) > loneLimit:
		t.settle(m)
		c.forget(t)
		return true
	}
	if m.failedAt == 0 {
		m.failedAt, m.unclearSince = sent, now
		if c.becameUnclear != nil {
			c.becameUnclear(m, cause)
		}
	}
	m.state = stateUnclear
	t.unclear = slices.DeleteFunc(t.unclear, func(s *entry) bool { return s.state != stateUnclear && s.state != stateInFlight })
	if !slices.Contains(t.unclear, m) {
		t.unclear = append(t.unclear, m)
	}
	t.retryAt = now.Add(t.retry.NextBackOff())
	if len(t.unclear) > 1 {
		c.open(t, sent, now, cause)
	}
	return false
}

// loneLimit is how long an unclear message without others of its topic is retried while messages
// of other topics pass, before it is blamed.
const loneLimit = 5 * time.Minute

// unrelated handles an outcome that says nothing about the topic or the sink: the next
// message probes.
func (c *circuits) unrelated(m *entry) {
	if t := c.find(m.Topic); t != nil {
		t.settle(m)
		if t.probe == m {
			t.probe = nil
		}
		if t.state == circuitHalfOpen {
			t.credit++
		}
		c.forget(t)
	}
	if c.sinkProbe == m {
		c.sinkProbe = nil
	}
}

// letOut is how many messages go out when a probe has passed, and each confirm then lets letOutMore
// out, so one more answer brings four times as many. A broker that confirms after 0.7 s gets 128 at a
// time after 2.1 s; with two for each confirm it would be 3.5 s, for which the last keys of a backlog
// would wait on top of the outage.
const (
	letOut     = 8
	letOutMore = 4
)

func (t *topic) settle(m *entry) {
	if i := slices.Index(t.unclear, m); i >= 0 {
		t.unclear = slices.Delete(t.unclear, i, i+1)
	}
}

// pass records that a message has passed. It returns unclear messages that are blamed as a
// result.
func (c *circuits) pass(m *entry) (blamed []*entry) {
	c.passed = max(c.passed, m.sent)
	if c.room > 0 {
		c.room += letOutMore - 1 // it has left room for one itself
	}
	if c.sinkProbe == m || c.sinkDown && m.sent > c.firstOpened() {
		c.sinkDown, c.sinkProbe, c.room = false, nil, letOut
		for _, t := range c.topics {
			t.retryAt = time.Time{} // each finds out for itself
		}
	}
	t := c.find(m.Topic)
	if t == nil {
		return nil
	}
	t.passed = max(t.passed, m.sent)
	t.settle(m)
	switch t.state {
	case circuitClosed, circuitHalfOpen:
		if t.state == circuitHalfOpen {
			t.credit += letOutMore
		}
		t.unclear = slices.DeleteFunc(t.unclear, func(s *entry) bool {
			if s.state == stateUnclear && t.passed > s.failedAt {
				blamed = append(blamed, s)
				return true
			}
			return false
		})
	case circuitOpen:
		if t.probe == m || m.sent > t.openedAt {
			t.state, t.probe, t.credit = circuitHalfOpen, nil, letOut
			t.retry.Reset()
		}
	}
	c.forget(t)
	return blamed
}

// firstOpened returns the number of the last publish before the oldest open circuit
// opened.
func (c *circuits) firstOpened() uint64 {
	first := ^uint64(0)
	for _, t := range c.topics {
		if t.state == circuitOpen {
			first = min(first, t.openedAt)
		}
	}
	return first
}

// trickle is how often a half-open topic releases one message, and an open one probes with
// another, even if nothing is confirmed.
const trickle = time.Second

// release releases withheld messages for which half-open topics have credit.
func (c *circuits) release(now time.Time, out func(*entry)) {
	for _, t := range slices.Clone(c.topics) {
		if t.state != circuitHalfOpen {
			continue
		}
		if t.credit == 0 && !now.Before(t.retryAt) {
			// The messages that used up the credit may have been lost, for example with
			// their lane.
			t.credit, t.retryAt = 1, now.Add(trickle)
		}
		t.withheld = slices.DeleteFunc(t.withheld, func(m *entry) bool {
			// Messages of lanes with crashes wait for their turn, those of paused lanes for an
			// operator. Credit spent on them would be missing for the lanes that need not wait.
			free := m.needsTurn()
			if m.state == stateWithheld && !m.hollow && (free || t.credit > 0) && !m.lane.halted() {
				if !free {
					t.credit--
				}
				m.released = true
				out(m)
			}
			return m.state != stateWithheld
		})
		if t.credit > 0 {
			t.refetch(now)
		}
		c.forget(t)
	}
}

// refetch has lanes read again for their hollow messages. Credit spent on these would be lost.
// A lane that has something else to send is read again only now and then: it forgets what it
// has read.
func (t *topic) refetch(now time.Time) {
	busy := !now.Before(t.refetchAt)
	for _, m := range t.withheld {
		if m.hollow && !m.lane.halted() && m.lane.announced == nil && (busy || m.lane.ready.next() == nil) {
			m.lane.refetch = true
			if busy {
				t.refetchAt = now.Add(trickle)
			}
		}
	}
}

// purge drops messages that are gone: their lane is lost, or they will be read again.
func (c *circuits) purge(gone func(*entry) bool) {
	dangling := func(m *entry) bool { return m != nil && gone(m) } // as in abandon
	for _, t := range slices.Clone(c.topics) {
		t.withheld = slices.DeleteFunc(t.withheld, gone)
		t.unclear = slices.DeleteFunc(t.unclear, gone)
		if dangling(t.probe) {
			t.probe = nil
		}
		c.forget(t)
	}
	if dangling(c.sinkProbe) {
		c.sinkProbe = nil
	}
}

// reachedAgain lets each topic, and the sink, probe at once if the sink reaches its broker again.
// The pauses have grown while it did not.
func (c *circuits) reachedAgain() {
	if c.reachable == nil {
		return
	}
	away := c.away
	if c.away = !c.reachable(); c.away || !away {
		return
	}
	for _, t := range c.topics {
		t.retryAt = time.Time{}
		t.retry.Reset()
	}
	if c.sinkDown {
		c.sinkRetryAt = time.Time{}
		c.sinkRetry.Reset()
	}
}

// abandon gives up probes that will have no outcome, and those that have had none for a
// while: a confirm may be lost, or a call never return. Another message then probes beside
// them. A late outcome counts like that of any message.
func (c *circuits) abandon(now time.Time) {
	lost := func(m *entry, since time.Time) bool {
		return m != nil && (now.After(m.lane.trusted) || m.state != stateAnnouncing && (m.state != stateInFlight || now.Sub(since) >= trickle))
	}
	for _, t := range c.topics {
		if lost(t.probe, t.probedAt) {
			t.probe = nil
		}
	}
	if lost(c.sinkProbe, c.sinkProbed) {
		c.sinkProbe = nil
	}
}

// wakeAt returns when the next probe may be published; zero: not before an event.
func (c *circuits) wakeAt() (due time.Time) {
	earlier := func(at time.Time) {
		if due.IsZero() || at.Before(due) {
			due = at
		}
	}
	if c.sinkDown {
		if c.sinkProbe == nil {
			earlier(c.sinkRetryAt)
		} else {
			earlier(c.sinkProbed.Add(trickle))
		}
		return due
	}
	for _, t := range c.topics {
		if t.probe != nil {
			earlier(t.probedAt.Add(trickle))
		}
		if t.state == circuitOpen && t.probe == nil && (c.inOrder || slices.ContainsFunc(t.withheld, func(m *entry) bool { return !m.lane.halted() })) ||
			t.state != circuitOpen && slices.ContainsFunc(t.unclear, func(m *entry) bool { return m.state == stateUnclear && !m.lane.halted() }) {
			earlier(t.retryAt)
		}
		if t.state == circuitHalfOpen && t.credit == 0 {
			earlier(t.retryAt)
		}
	}
	return due
}

// forget drops a circuit that has no state left.
func (c *circuits) forget(t *topic) {
	if t.state == circuitOpen || len(t.unclear) > 0 || len(t.withheld) > 0 ||
		t.state == circuitHalfOpen && t.moreDue && t.credit < c.enough {
		return
	}
	c.drop(t)
}

func (c *circuits) drop(t *topic) {
	c.topics = slices.DeleteFunc(c.topics, func(o *topic) bool { return o == t })
	delete(c.byName, t.name)
	if t.state != circuitClosed && c.changed != nil {
		c.changed(t.name, nil)
	}
}

// sweep drops open circuits that have had nothing to probe with for long: their
// messages are gone, or with another worker.
func (c *circuits) sweep(now time.Time) {
	for _, t := range slices.Clone(c.topics) {
		if n := len(t.unclear); n > 0 {
			t.unclear = slices.DeleteFunc(t.unclear, func(m *entry) bool { return m.state == stateForgotten })
			if len(t.unclear) < n {
				c.forget(t)
			}
		}
		if t.state == circuitOpen && !c.inOrder && t.probe == nil && len(t.withheld) == 0 && now.Sub(t.retryAt) > time.Minute {
			c.drop(t)
		}
	}
	if len(c.topics) == 0 {
		c.sinkDown = false
	}
}
