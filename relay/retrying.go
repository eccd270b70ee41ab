package relay

import (
	"cmp"
	"slices"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// stopFailing removes failing messages from their keys. If one is to be retried,
// its followers go there too. Of several messages of one key that were sent together,
// only the first counts; the others are sent again.
func (l *lane) stopFailing() {
	l.failing = slices.DeleteFunc(l.failing, func(m *entry) bool {
		key := l.orderKey(m)
		if m.moving || key == "" {
			return false
		}
		if l.chains[key].failing == m {
			return false
		}
		if !m.failure.Uncharged {
			m.attempts--
		}
		m.state, m.failure = stateWaiting, nil
		return true
	})
	for _, m := range l.failing {
		key := l.orderKey(m)
		if m.moving || key == "" {
			continue
		}
		c := l.chains[key]
		c.remove(m)
		if m.failure.Fate != relaystore.FateDeadLetter {
			l.startRetrying(c)
			continue
		}
		for o := c.head; o != nil; o = o.next {
			if o.state == stateReady || o.state == stateAgain {
				o.state = stateWaiting // in a pipeline they were to follow at once
			}
		}
	}
}

// startRetrying marks a key as retrying and makes its known messages followers, except
// those in flight.
func (l *lane) startRetrying(c *chain) {
	l.retract(c)
	c.retrying = true
	rest := c.head
	c.head, c.tail, c.length = nil, nil, 0
	for m := rest; m != nil; {
		next := m.next
		m.next = nil
		switch {
		case m.state == stateInFlight:
			c.insert(m)
		case m.retrying:
			l.forget(m) // it is read again when it is due
		default:
			m.state = stateFollower
			l.followers = append(l.followers, m)
		}
		m = next
	}
}

// retract takes back an announcement of a key.
func (l *lane) retract(c *chain) {
	if m := l.announced; m != nil && c.head == m {
		l.cancel()
	}
}

// endRetrying lets a key continue that has no retrying messages left.
func (l *lane) endRetrying(key string) {
	c := l.chains[key]
	if c == nil || !c.retrying || c.failing != nil || l.swept[key] {
		return // swept rows are on their way to the table parked
	}
	l.retract(c)
	c.retrying = false
	// Known retrying messages are gone: a former owner has removed them.
	for m := c.head; m != nil; {
		next := m.next
		if m.retrying && m.state != stateInFlight {
			c.remove(m)
			l.forget(m)
		}
		m = next
	}
	var mine []*entry
	l.followers = slices.DeleteFunc(l.followers, func(m *entry) bool {
		if m.Key != key || m.moving {
			return false
		}
		mine = append(mine, m)
		return true
	})
	slices.SortFunc(mine, func(a, b *entry) int { return cmp.Compare(a.ID, b.ID) })
	for _, m := range mine {
		m.state = stateWaiting
		c.insert(m)
	}
	l.resume(c)
	l.forgetKey(key, c)
}
