package relay

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// read is a running read.
type read struct {
	outboxstore.ReadRequest
	ahead   *outboxstore.Ahead // nil: from the start of the lanes
	lanes   []*lane
	trusted []time.Time // of each: what the read was made under
	began   time.Time
	took    time.Duration // without what came in pieces afterwards; 0: until the answer was taken
	brought int           // bytes, in this time
	retryIn time.Duration // after an error
	space   *space        // that large messages take; what comes in pieces adds to it

	// short holds the lanes with a large message that is yet to come (nil), or could
	// not be read. The reader sets it.
	short map[int]error
}

// reads decides what to read next.
type reads struct {
	running bool
	woken   bool          // something was committed while that read ran
	stale   bool          // the result of that read is useless
	retryAt time.Time     // not before, after a failure
	poll    time.Duration // current poll interval
	pollAt  time.Time     // dry lanes are read again then

	rows    pace // rows that a read may return, of all lanes
	breadth int  // lanes whose last read has failed, in one read
	sound   bool // the last read was of lanes that can be read
	last    int  // the lane that the last read ended with, if it left some out

	absolved bool     // doubt about lanes was dropped once, and not all of them have been read since
	answered int      // reads answered
	slow     int      // reads in a row that passed busy keys over and took long
	baseline baseline // of the time of a read
}

// nextRead returns the read that is due, or nil. It leaves out lanes that have enough
// to do, are full, or wait after a failure. For a moment it also leaves out lanes that
// only know many rows about to be deleted, which the read would have to pass over. Rows
// that another transaction has locked fill no lane. Nothing is read while too many
// confirmed rows cannot be deleted: what may be repeated after a crash must not grow
// without bound.
func (e *engine) nextRead(now time.Time) *read {
	if e.reads.running || now.Before(e.reads.retryAt) || e.removals.undeleted() >= maxUndeleted {
		return nil
	}
	if r := e.lookAhead(now); r != nil {
		return r
	}
	polled := !now.Before(e.reads.pollAt)
	if polled {
		e.wake()
		e.reads.pollAt = now.Add(e.reads.poll)
	}
	wanting, starving, held := e.wanting(now)
	if len(wanting) == 0 {
		if polled {
			e.reads.poll = min(2*e.reads.poll, e.limits.pollMax)
		}
		return nil
	}
	if !starving && len(wanting) < held/2 {
		return nil // more of them soon: a read for a few costs as much as for many
	}
	wanting = e.reads.narrow(wanting)
	rows := e.reads.rowsEach(len(wanting), e.limits.laneRows)
	r := &read{ReadRequest: outboxstore.ReadRequest{Rows: rows, Bytes: e.limits.laneBytes / e.limits.laneRows * rows, Hollow: e.hollowTopics(now)}, lanes: wanting, began: now, space: e.space()}
	for _, l := range wanting {
		l.reading, l.keyFreed, l.readBegan = true, false, now
		r.Lanes, r.trusted = append(r.Lanes, l.number), append(r.trusted, l.trusted)
		r.Busy = l.busy(r.Busy)
		r.Known = l.appendKnown(r.Known)
	}
	r.Peek = polled && e.atRest()
	e.reads.running = true
	return r
}

// atRest reports whether reads have found nothing for a while, and no message is known.
func (e *engine) atRest() bool {
	return e.reads.poll >= e.limits.pollMax && !slices.ContainsFunc(e.lanes[:], func(l *lane) bool { return l != nil && len(l.entries) > 0 })
}

// mostLarge bounds the bytes in memory of large messages that are being published,
// except the last of them. One topic gets half of what the others leave: its messages
// may never be confirmed.
const mostLarge = 64 << 20

// space counts the bytes of large messages that are being published.
type space struct {
	taken int
	of    map[string]int // of each topic
}

func (s *space) take(topic string, bytes int) {
	s.taken += bytes
	s.of[topic] += bytes
}

// has reports whether a topic has room for one more.
func (s *space) has(topic string) bool {
	return s.taken < mostLarge && s.of[topic] < max(1, (mostLarge-(s.taken-s.of[topic]))/2)
}

// space returns the space that large messages take.
func (e *engine) space() *space {
	s := &space{of: map[string]int{}}
	for _, l := range e.lanes {
		if l == nil || l.bytes+l.retryingBytes <= leastPiece {
			continue
		}
		for _, m := range l.entries {
			if n := m.size(); n > leastPiece && (m.state == stateReady || m.state == stateInFlight || m.state == stateAgain) {
				s.take(m.Topic, n)
			}
		}
	}
	return s
}

// appendKnown appends the rows that reads of a lane are to pass over.
func (l *lane) appendKnown(known []outboxstore.Known) []outboxstore.Known {
	for _, m := range l.entries {
		known = append(known, outboxstore.Known{ID: m.ID, CreatedAt: m.CreatedAt})
	}
	return known
}

// putOffReads delays the next read of a lane after a read of it alone has failed. If
// others are answered meanwhile, the lane is to blame, maybe a message too large for the
// connection, and is tried more and more rarely.
func (e *engine) putOffReads(l *lane, r *read, now time.Time) {
	if e.reads.answered > l.unreadableAt {
		l.unreadable, l.unreadableAt = l.unreadable+1, e.reads.answered
	}
	if r.short == nil && l.unreadable <= 1 && r.began.Before(e.backAt) { // pieces have a pause of their own
		return
	}
	l.readAt = now.Add(min(readAgain<<min(l.unreadable, 8), readRarely))
}

// narrow leaves lanes out of a read. Lanes whose last read has failed are read apart
// from the others, in turn with them, and fewer at a time with each failure, or more with
// each answer. The read may have been too large for its time, or one of them cannot be read.
func (r *reads) narrow(lanes []*lane) []*lane {
	var doubted, sound []*lane
	for _, l := range lanes {
		if l.readFailed {
			doubted = append(doubted, l)
		} else {
			sound = append(sound, l)
		}
	}
	r.sound = len(sound) > 0 && (len(doubted) == 0 || !r.sound)
	if r.sound {
		return sound
	}
	if len(doubted) <= r.breadth {
		return doubted
	}
	first, _ := slices.BinarySearchFunc(doubted, r.last+1, func(l *lane, n int) int { return l.number - n })
	chosen := slices.Concat(doubted[first:], doubted[:first])[:r.breadth]
	r.last = chosen[len(chosen)-1].number
	slices.SortFunc(chosen, func(a, b *lane) int { return a.number - b.number })
	return chosen
}

// absolve drops the doubt about lanes whose reads failed while the database was away, so that all are read
// at once now that it is back. If reads fail again, they may be what stops it: then the doubt stays until
// all lanes have been read, or each time the database is back they would stop it again.
func (r *reads) absolve(lanes []*lane) {
	if r.absolved || !slices.ContainsFunc(lanes, (*lane).doubted) {
		return
	}
	r.absolved, r.breadth = true, outbox.Lanes
	for _, l := range lanes {
		if l.doubted() {
			l.readFailed = false
		}
	}
}

// doubted reports whether the last read of a lane has failed, maybe not by its own fault. One that is
// paused does not count until it may be read again.
func (l *lane) doubted() bool { return l != nil && l.readFailed && l.unreadable <= 1 && !l.paused }

const (
	// firstReadRows is the first limit on the rows of a read: not more than 1 MiB,
	// except for messages that are larger.
	firstReadRows = 256

	// quickRead is the longest read after which the size may grow.
	quickRead = time.Second
)

// rowsEach returns how many rows a read may return per lane, for a number of lanes.
func (r *reads) rowsEach(lanes, most int) int {
	return max(1, min(r.rows.size/lanes, most))
}

// maxEntries bounds a lane's memory, in reads.
const maxEntries = 8

// wanting returns the lanes that are worth a read, whether one of them has nothing left
// to publish, and how many lanes are held.
func (e *engine) wanting(now time.Time) (lanes []*lane, starving bool, held int) {
	for _, l := range e.lanes {
		if l == nil || l.paused {
			continue
		}
		held++
		switch {
		case l.draining, l.dry, !l.loaded, now.After(l.trusted), now.Before(l.readAt),
			l.ready.len() > e.limits.laneRows/2,
			l.bytes >= e.limits.laneBytes && !e.relieve(l, now), len(l.failing) >= e.limits.laneRows, len(l.entries)-l.locked >= maxEntries*e.limits.laneRows,
			len(l.entries) >= e.limits.laneRows/2 && len(e.circuits.topics)+len(e.paused.withheld) == 0 && l.nothingToSend() && now.Sub(l.readBegan) < readAgain:
			continue
		}
		lanes = append(lanes, l)
		starving = starving || l.ready.len() == 0
	}
	return lanes, starving, held
}

// read handles the result of a read. Entries of one lane come together, in order. A
// result that arrives after the lease under which it was requested is ignored: another
// server may hold the lease by now.
func (e *engine) read(r *read, entries []*entry, now time.Time, err error) {
	e.reads.running = false
	woken, inTime := e.reads.woken, err == nil && !e.reads.stale
	e.reads.woken, e.reads.stale, e.reads.retryAt = false, false, e.againAt(now, r.began, r.retryIn)
	found, full := 0, false
	for i, l := range r.lanes {
		useful := inTime && !now.After(r.trusted[i]) && !l.refetched
		l.refetched = false
		n := 0
		for n < len(entries) && entries[n].Lane == l.number {
			n++
		}
		mine := entries[:n]
		entries = entries[n:]
		for _, m := range mine {
			m.ahead = r.ahead != nil
		}
		if useful && !l.draining { // a dropped lane is draining too
			found += l.add(mine)
		}
		l.reading = false
		if r.ahead != nil {
			continue
		}
		bytes := 0
		for _, m := range mine {
			bytes += m.size()
		}
		_, cut := r.short[l.number]
		more := len(mine) >= r.Rows || bytes >= r.Bytes || cut
		full = full || more
		whole := useful && !more
		l.dry = whole && !woken && !l.keyFreed
		if l.dry {
			l.otherTopic = 0
		}
		if whole {
			l.behind = time.Time{}
		}
	}
	if err != nil && !sqlerr.TimedOut(err) { // a timeout is an answer
		e.forgetUnsent()
	}
	if r.ahead != nil {
		e.lookedAhead(r, found, now, err)
		return
	}
	took := cmp.Or(r.took, now.Sub(r.began))
	if err != nil {
		e.reads.rows.failed()
		e.reads.breadth = max(1, min(e.reads.breadth, len(r.lanes))/4)
		for _, l := range r.lanes {
			l.readFailed = true
		}
		if r.began.Before(e.backAt) { // it hung over the end of an outage
			e.reads.absolve(e.lanes[:])
		}
		if len(r.lanes) == 1 {
			e.putOffReads(r.lanes[0], r, now)
		}
	} else {
		if full {
			e.reads.rows.took(took, e.limits.quickRead)
		}
		e.reads.answered++
		for _, l := range r.lanes {
			l.readFailed = false
			switch err := r.short[l.number]; {
			case errors.Is(err, errBehind):
				l.readAt = now.Add(lookAgain)
			case err != nil:
				e.putOffReads(l, r, now)
			default:
				l.unreadable, l.unreadableAt = 0, e.reads.answered
			}
		}
		if !slices.ContainsFunc(e.lanes[:], (*lane).doubted) && !r.began.Before(e.backAt) {
			e.reads.absolved = false
		}
		switch {
		case !slices.ContainsFunc(e.lanes[:], func(l *lane) bool { return l != nil && l.readFailed }):
			e.reads.breadth = outbox.Lanes
		case !e.reads.sound:
			e.reads.breadth = min(2*e.reads.breadth, outbox.Lanes)
		}
	}
	e.sweepSlow(r, took, now, err)
	// Polls are frequent while they find something, then slower.
	if found > 0 {
		e.reads.poll = e.limits.pollMin
	} else {
		e.reads.poll = min(2*e.reads.poll, e.limits.pollMax)
	}
	if r.short == nil { // it took its time, and is followed by another one: a poll may be due
		e.reads.pollAt = now.Add(e.reads.poll)
	}
}

// readAgain is how long a lane is left out after a read of it alone has failed, or if
// it only knows rows about to be deleted.
const readAgain = time.Second

// readRarely is the longest time for which a lane is left out.
const readRarely = time.Minute
