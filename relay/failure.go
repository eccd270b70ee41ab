package relay

import (
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// Classes of reasons why a message fails. Operators see them and filter by them.
const (
	classRefused    = "refused"
	classMalformed  = "malformed"
	classUnroutable = "unroutable"
	classUnknown    = "failed"
	classCrashed    = "crashed"

	classSlow = "unanswered" // never confirmed in time, while others were

	classUnavailable = "unavailable" // the message is not blamed: set aside
	classPaused      = "paused"      // nor here
)

// class returns the class of a refusal of m.
func (m *entry) class() string {
	if m.malformed != nil {
		return classMalformed
	}
	return classRefused
}

// charge counts a failed attempt of m, and decides what follows. Nothing of its key
// is published before that is recorded.
func (e *engine) charge(m *entry, now time.Time, class, text string) {
	l := m.lane
	m.attempts++
	f := &relaystore.Failure{Ref: m.ref(), Retrying: m.retrying, Attempt: m.attempts, Unanswered: m.unanswered, Class: class, Text: text, Stack: m.stack, Topic: m.Topic, Key: m.Key}
	switch {
	case m.attempts < e.limits.attempts.MaxAttempts && !e.outOfTime(m, now):
		f.Fate, f.RetryIn = relaystore.FateRetry, e.limits.attempts.wait(m.attempts, e.limits.draw)
	case e.limits.attempts.Exhausted == ExhaustedHoldKey && l.orderKey(m) != "":
		f.Fate = relaystore.FateHoldKey
	default:
		f.Fate = relaystore.FateDeadLetter
	}
	m.failedAt = 0
	e.fail(m, f)
}

// outOfTime reports whether Retry.TimeLimit is over for an attempt that has just failed. How long
// the message was due before it was handed to the sink does not count: it was paused, its topic was
// unavailable, or nothing ran. So it gets one more attempt after that.
func (e *engine) outOfTime(m *entry, now time.Time) bool {
	limit := e.limits.attempts.TimeLimit
	if limit == 0 || m.attempts == 1 {
		return false
	}
	took := time.Duration(0)
	if !m.handed.IsZero() {
		took = now.Sub(m.handed)
	}
	return m.age+took >= limit
}

// postpone retries m later, without using up an attempt: the message or its topic may be
// at fault. The longer that lasts, the longer it waits.
func (e *engine) postpone(m *entry, now time.Time, class, text string) {
	waited := time.Duration(0)
	if !m.unclearSince.IsZero() {
		waited = now.Sub(m.unclearSince)
	}
	e.fail(m, &relaystore.Failure{
		Ref: m.ref(), Retrying: m.retrying, Attempt: m.attempts, Uncharged: true, Unanswered: m.unanswered, Class: class, Text: text, Stack: m.stack,
		Fate: relaystore.FateRetry, RetryIn: e.limits.draw(2 * min(max(waited, e.limits.postponed), postponeMost*e.limits.postponed)),
	})
}

const (
	postponeLeast = 5 * time.Second
	postponeMost  = 60 // times postponeLeast
)

// fail schedules a failure to be recorded. Nothing of the message's key is published
// before that.
func (e *engine) fail(m *entry, f *relaystore.Failure) {
	l := m.lane
	l.waited++
	m.state, m.failure = stateFailed, f
	l.failing = append(l.failing, m)
	if key := l.orderKey(m); key != "" {
		if c := l.chain(key); c.failing == nil || m.ID < c.failing.ID {
			c.failing = m
		}
	}
	if e.circuits.inOrder && l.inFlight > 0 {
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
