package relay

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// outcomeKind classifies an outcome.
type outcomeKind uint8

const (
	confirmedOutcome   outcomeKind = iota
	unavailableOutcome             // the message is not blamed
	refusedOutcome                 // the message cannot be delivered
	interruptedOutcome             // only the channel of the lane failed
	unroutableOutcome              // no receiver: the message or its topic is at fault
	unknownOutcome                 // an error of unknown kind
)

func classify(err error) outcomeKind {
	switch {
	case err == nil:
		return confirmedOutcome
	case errors.Is(err, ErrUnroutable):
		return unroutableOutcome
	case errors.Is(err, ErrRefused):
		return refusedOutcome
	case errors.Is(err, ErrInterrupted):
		return interruptedOutcome
	case errors.Is(err, ErrUnavailable):
		return unavailableOutcome
	default:
		return unknownOutcome
	}
}

// Classes of reasons why a message fails. Operators see them and filter by them.
const (
	classRefused    = "refused"
	classMalformed  = "malformed"
	classUnroutable = "unroutable"
	classUnknown    = "failed"
	classCrashed    = "crashed"

	classSlow = "unanswered" // never confirmed in time, while others were

	classUnavailable = "unavailable" // the message is not blamed: set aside
)

// class returns the class of a refusal of m.
func (m *entry) class() string {
	if m.malformed != nil {
		return classMalformed
	}
	return classRefused
}

// charge counts a failed attempt of m, and decides what follows. Nothing of its key
// goes out before that is recorded.
func (e *engine) charge(m *entry, now time.Time, class, text string) {
	l := m.lane
	m.attempts++
	f := &failure{Ref: m.ref(), parked: m.parked, attempt: m.attempts, unanswered: m.unanswered, class: class, text: text}
	late := !m.expires.IsZero() && !now.Before(m.expires)
	switch {
	case m.attempts < e.attempts.MaxAttempts && !late:
		f.verdict, f.retryIn = retryLater, e.attempts.wait(m.attempts, e.draw)
	case e.attempts.Exhausted == ExhaustedHoldKey && l.orderKey(m) != "":
		f.verdict = letterHold
	default:
		f.verdict = letterSkip
	}
	m.failedAt = 0
	e.fail(m, f)
}

// postpone lets m wait in parked, without charging it: the message or its topic may be
// at fault. The longer that lasts, the longer it waits.
func (e *engine) postpone(m *entry, now time.Time, class, text string) {
	waited := time.Duration(0)
	if !m.doubted.IsZero() {
		waited = now.Sub(m.doubted)
	}
	e.fail(m, &failure{
		Ref: m.ref(), parked: m.parked, attempt: m.attempts, free: true, unanswered: m.unanswered, class: class, text: text,
		verdict: retryLater, retryIn: e.draw(2 * min(max(waited, e.postponed), postponeMost*e.postponed)),
	})
}

const (
	postponeLeast = 5 * time.Second
	postponeMost  = 60 // times postponeLeast
)

// fail schedules a failure to be recorded. Nothing of the message's key goes out before
// that.
func (e *engine) fail(m *entry, f *failure) {
	l := m.lane
	l.waited++
	m.state, m.failure = charged, f
	l.failing = append(l.failing, m)
	if key := l.orderKey(m); key != "" {
		if c := l.chain(key); c.failing == nil || m.ID < c.failing.ID {
			c.failing = m
		}
	}
	if e.inOrder && l.inFlight > 0 {
		l.restarting = true // what follows m may be in flight: see restart
		return
	}
	l.stopFailing()
}

// wait returns how long a message waits after its n-th failed attempt.
func (r Retry) wait(n int, d draw) time.Duration {
	interval := r.Initial
	for ; n > 1 && interval < r.Max; n-- {
		interval *= 2
	}
	return d(2 * min(interval, r.Max))
}

// stopFailing removes failing messages from their keys. If one is to stay in parked,
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
		if !m.failure.free {
			m.attempts--
		}
		m.state, m.failure = waiting, nil
		return true
	})
	for _, m := range l.failing {
		key := l.orderKey(m)
		if m.moving || key == "" {
			continue
		}
		c := l.chains[key]
		c.remove(m)
		if m.failure.verdict != letterSkip {
			l.park(c)
			continue
		}
		for o := c.head; o != nil; o = o.next {
			if o.state == ready || o.state == again {
				o.state = waiting // in a pipeline they were to follow at once
			}
		}
	}
}

// park marks a key as parked and makes its known messages followers, except those in
// flight.
func (l *lane) park(c *chain) {
	l.retract(c)
	c.parked = true
	rest := c.head
	c.head, c.tail, c.length = nil, nil, 0
	for m := rest; m != nil; {
		next := m.next
		m.next = nil
		switch {
		case m.state == inFlight:
			c.insert(m)
		case m.parked:
			l.forget(m) // it is read again when it is due
		default:
			m.state = follower
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

// unpark lets a key continue that has no rows left in parked.
func (l *lane) unpark(key string) {
	c := l.chains[key]
	if c == nil || !c.parked || c.failing != nil || l.swept[key] {
		return // swept rows are on their way to parked
	}
	l.retract(c)
	c.parked = false
	// Rows known from parked are gone from there: a former owner has settled them.
	for m := c.head; m != nil; {
		next := m.next
		if m.parked && m.state != inFlight {
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
		m.state = waiting
		c.insert(m)
	}
	l.goOn(c)
	l.tidy(key, c)
}

// writeFailures records the failures of one lane, and moves followers.
func (e *engine) writeFailures(l *lane) *chore {
	failed, followers := slices.Clone(l.failing), slices.Clone(l.followers[:min(len(l.followers), maxFollowers)])
	if l.oneByOne {
		if len(failed) > 0 {
			failed, followers = failed[:1], nil
			l.failing = append(l.failing[1:], failed[0]) // the next one has its turn
		} else {
			followers = followers[:1]
			// The next key has its turn. The entries of this one keep their order.
			others := slices.DeleteFunc(slices.Clone(l.followers), func(m *entry) bool { return m.Key == followers[0].Key })
			l.followers = slices.DeleteFunc(l.followers, func(m *entry) bool { return m.Key != followers[0].Key })
			l.followers = append(others, l.followers...)
		}
	}
	failures := make([]failure, len(failed))
	for i, m := range failed {
		m.moving = true
		failures[i] = *m.failure
	}
	refs, f := entryRefs(followers), e.fence(l)
	for _, m := range followers {
		m.moving = true
	}
	return &chore{
		lane: l, failures: failures,
		undo: func(choreError) {
			l.oneByOne = true
			for _, m := range slices.Concat(failed, followers) {
				m.moving = false
			}
		},
		do: func(ctx choreContext) (func(), error) { return nil, ctx.store.fail(ctx, f, failures, refs) },
		done: func(now time.Time) {
			l.followAt = now.Add(followLinger)
			moved := func(m *entry) bool { return m.moving }
			l.failing = slices.DeleteFunc(l.failing, moved)
			l.followers = slices.DeleteFunc(l.followers, moved)
			for _, m := range followers {
				l.forget(m)
			}
			if len(followers) > 0 {
				l.dry, l.unbusied = false, true // there may be more of their keys
				// A former owner may have deleted the rows that they were moved behind.
				e.parkedDue(now)
			}
			for _, m := range failed {
				l.forget(m)
				e.written(m, now)
			}
		},
	}
}

// written continues after a failure has been recorded.
func (e *engine) written(m *entry, now time.Time) {
	l := m.lane
	key := l.orderKey(m)
	switch m.failure.verdict {
	case retryLater:
		e.parkedDue(now.Add(m.failure.retryIn))
	case letterSkip:
		if m.parked {
			e.parkedDue(now)
			l.loaded = l.loaded && key == "" // was it the last one of its key in parked?
		}
	case letterHold:
	}
	if m.late {
		l.loaded = false // is anything of its key in parked?
	}
	c := l.chains[key]
	if key == "" || c == nil {
		return
	}
	if c.failing == m {
		c.failing = nil
	}
	l.goOn(c)
	l.tidy(key, c)
}

func entryRefs(entries []*entry) []outboxstore.Ref {
	refs := make([]outboxstore.Ref, len(entries))
	for i, m := range entries {
		refs[i] = m.ref()
	}
	return refs
}
