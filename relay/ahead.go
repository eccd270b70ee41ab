package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// ahead decides when to read past messages that wait, and of which topics.
//
// A lane is read from its start. Messages that can be published are published faster than
// they are read. The others must first be tried and their failure recorded: 100,000
// messages whose topics have no queue would delay the messages behind them for half a
// minute. If more of a lane waits than is published, and the lane has unread rows, the
// reader sometimes looks ahead for rows that may go before those in front of them.
// These are rows of topics that work, and a few of the newest of any other topic that
// is not in trouble, since it may work, too. They take room of their own.
//
// That keeps the order of keys. A row with a key is returned only if the statement has
// gone through the whole table and found no earlier row of the key, except rows that
// the lane knows: behind those it waits in its chain like any other. Reads of a lane do
// not overlap, and a read during which the lane forgets something is ignored. So rows
// that were known to the statement are still known, or dealt with, when the answer
// arrives.
type ahead struct {
	working map[string]bool // topics of which something has been confirmed
	at      time.Time       // when the next look may begin
	scanAt  time.Time       // not before then are earlier rows of keys looked for
	until   time.Time       // while a look runs: nothing of other topics is tried before; see holds
}

const (
	aheadEvery  = 50 * time.Millisecond
	aheadHolds  = 250 * time.Millisecond // the longest part of a look in which nothing is tried
	aheadFailed = 10 * time.Second       // the pause after a look that has failed
	aheadIdle   = 5                      // the pause after one that has found nothing, in looks
	aheadRows   = 64                     // of each lane in one look; twice that in memory
	aheadBytes  = 256 << 10              // of them
	aheadNewest = 4                      // of them, of topics of which nothing is known
	aheadLook   = 200                    // of each lane, the newest, to choose from
	aheadKeys   = 1000                   // of each lane, to pass over
	aheadScan   = 500_000
	mostWorking = 256
)

// works records that a message of a topic was confirmed.
func (a *ahead) works(topic string) {
	if a.working[topic] {
		return
	}
	if a.working == nil {
		a.working = map[string]bool{}
	}
	for some := range a.working {
		if len(a.working) < mostWorking {
			break
		}
		delete(a.working, some) // a topic with traffic returns at once
	}
	a.working[topic] = true
}

// lookAhead returns the look-ahead that is due, or nil.
func (e *engine) lookAhead(now time.Time) *read {
	if e.circuits.inOrder || now.Before(e.ahead.at) || !e.circuits.worthLooking() {
		return nil
	}
	var lanes []*lane
	for _, l := range e.lanes {
		switch {
		case l == nil:
		case l.dry:
			l.behind = time.Time{}
		case l.behind.IsZero():
			l.behind = now
		case now.Sub(l.behind) >= e.limits.aheadEvery && l.went <= l.waited && e.waits(l) && e.mayPublish(l, now) && e.roomAhead(l, now):
			lanes = append(lanes, l)
		}
		if l != nil {
			l.went, l.waited = l.went/2, l.waited/2
		}
	}
	if len(lanes) == 0 {
		e.ahead.at = now.Add(e.limits.aheadEvery)
		return nil
	}
	a := &outboxstore.Ahead{Newest: aheadNewest, Look: e.limits.aheadLook, Unordered: e.limits.order == OrderNone}
	if !a.Unordered && !now.Before(e.ahead.scanAt) {
		a.Scan = e.limits.aheadScan
	}
	for _, t := range e.circuits.topics {
		if t.state == circuitOpen {
			a.Not = append(a.Not, t.name)
		}
	}
	a.Not = e.paused.passOver(a.Not)
	for topic := range e.ahead.working {
		if !slices.Contains(a.Not, topic) {
			a.Topics = append(a.Topics, topic)
		}
	}
	r := &read{ReadRequest: outboxstore.ReadRequest{Rows: aheadRows, Bytes: aheadBytes}, ahead: a, lanes: lanes, began: now}
	for _, l := range lanes {
		l.reading = true
		r.Lanes, r.trusted = append(r.Lanes, l.number), append(r.trusted, l.trusted)
		r.Busy = l.appendStuck(l.busy(r.Busy))
		r.Known = l.appendKnown(r.Known)
	}
	e.reads.running = true
	e.ahead.until = now.Add(aheadHolds)
	return r
}

// holds reports whether m is not to be tried while a look runs. Tries of topics that may
// not work keep the database and the broker busy, and would make the look, which those
// that do work wait for, take several times as long.
func (a *ahead) holds(m *entry, now time.Time) bool {
	return now.Before(a.until) && !m.ahead && !m.retrying && !a.working[m.Topic]
}

// lookedAhead handles the part of the answer that is specific to a look-ahead.
func (e *engine) lookedAhead(r *read, found int, now time.Time, err error) {
	e.ahead.until = time.Time{}
	took := now.Sub(r.began)
	pause := took / 2
	switch {
	case err != nil && r.ahead.Scan > 0 && sqlerr.TimedOut(err):
		e.ahead.scanAt = now.Add(aheadFailed) // meanwhile messages without a key
	case err != nil:
		pause = aheadFailed
	case found == 0:
		pause = aheadIdle * took
	}
	e.ahead.at = now.Add(max(e.limits.aheadEvery, pause))
}

// appendStuck appends keys of which nothing more can be published now. If there are very
// many, it appends some, and others the next time.
func (l *lane) appendStuck(keys []string) []string {
	most := len(keys) + aheadKeys
	for key, c := range l.chains {
		if len(keys) == most {
			break
		}
		if c.stuck() {
			keys = append(keys, key)
		}
	}
	return keys
}

// waits reports whether messages that cannot be published may be in front in a lane.
func (e *engine) waits(l *lane) bool {
	return len(e.circuits.topics) > 0 || len(e.paused.withheld) > 0 || len(l.followers) > 0 || len(l.failing) > 0 || len(l.swept) > 0
}

// roomAhead reports whether a lane has room for the rows of a look-ahead, separate from
// the room for its other reads. Rows that have to wait now take none, up to a bound.
func (e *engine) roomAhead(l *lane, now time.Time) bool {
	if l.bytes >= e.limits.laneBytes {
		e.relieve(l, now)
	}
	rows, bytes := 0, 0
	for _, m := range l.entries {
		if m.ahead && (m.state == stateReady || m.state == stateInFlight || m.state == stateWaiting && !l.stuckKey(m)) {
			rows++
			bytes += m.size()
		}
	}
	return rows < 2*aheadRows && bytes < aheadBytes && len(l.entries)-l.locked < 2*maxEntries*e.limits.laneRows
}
