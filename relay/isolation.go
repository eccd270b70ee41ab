package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// isolation tracks which lanes with crashes have the turn to send. If the worker dies, the other
// lanes with crashes were not involved.
//
// After two crashes, turnLanes lanes have their turn at a time, and their messages go together:
// that costs few writes for many messages. If the worker dies of them too, these lanes are
// known, and each has a turn of its own; after one more crash it sends one message at a time,
// with a write for each. So crashes that no message has caused cost little, however many lanes
// they hit. Where confirms are slow, turns overlap, and one more crash leaves up to 16 lanes under
// suspicion.
type isolation struct {
	turn  *lane   // the lane that took it
	group []*lane // it, and those that may be recorded with it: they send in the same turn

	// These lanes have had their turn, but some of their messages are in flight, and recorded as
	// such. Meanwhile the next turns go on, so that slow confirms delay the others less. Once it is
	// offered a turn, what must be alone waits until nobody is left here.
	ending []*lane

	// Nobody has the turn: the lanes after the last one may take it, one after the other.
	last    int // number of a lane
	next    *lane
	offered time.Time
}

const (
	isolatedFrom = 2 // crashes; the statements of a takeover know the number, too
	singleFrom   = 4
)

// turnLanes is how many lanes with two crashes share a turn. 32 lanes then have eight turns.
const turnLanes = 4

// mostEnding bounds what is in flight of turns that have ended. One more turn goes on beside them.
const mostEnding = 3 * turnLanes

// suspects returns how much of mostEnding lanes take up. One that has a turn of its own counts as two
// groups, so that two of these overlap at most: after one more crash, each message of them is alone.
func suspects(lanes []*lane) (n int) {
	for _, l := range lanes {
		if l.crashes > isolatedFrom {
			n += 2 * turnLanes
		} else {
			n++
		}
	}
	return n
}

// isolatedTurns is how many messages a lane sends in a turn, at most: more than isolatedMessages,
// since some may come back without having shown anything, and a lane that is one message short of
// that would wait for all other lanes. Ending a turn costs a write, to clear what was recorded
// last.
const isolatedTurns = 2 * isolatedMessages

// share is how long so many lanes may send in a turn. Then every lane has its turn within about
// half a lease, if database and broker are not slow: the lanes have waited for the lease of the
// worker that died.
func (e *engine) share(lanes int) time.Duration {
	return e.limits.lease * time.Duration(lanes) / (2 * outbox.Lanes)
}

// mayKeepTurn reports whether a lane may go on in its turn. Where lanes share one, their keys have
// the time for some messages each.
func (e *engine) mayKeepTurn(l *lane, now time.Time) bool {
	return l.sentInTurn < isolatedTurns && (e.limits.lease == 0 || now.Sub(l.turnBegan) < e.share(len(e.isolation.group)))
}

// isolatedMessages is how many messages a lane sends in turns before it is trusted again: its
// part of the default window, if the worker holds all lanes. If the message that kills workers
// lies behind that, it is met again, nearer to the start. Meanwhile keys behind the others
// stand, so more would cost too much after crashes that no message has caused.
const isolatedMessages = 32

// isolated lanes send in turns.
func (l *lane) isolated() bool { return l.crashes >= isolatedFrom }

// mustBeAlone reports whether nothing else of an isolated lane may be in flight with m, so that
// m is known to be the message that kills workers.
func (m *entry) mustBeAlone() bool { return m.crashed || m.lane.crashes >= singleFrom }

// needsTurn reports whether m goes in its lane's turn only.
func (m *entry) needsTurn() bool { return m.crashed || m.lane.isolated() }

// needsRecord reports whether it must be recorded that m, or the messages of its lane, are about
// to be in flight.
func (m *entry) needsRecord() bool { return m.needsTurn() && (m.mustBeAlone() || !m.lane.together) }

// hasTurn reports whether m may be published, if it needs a turn.
func (i *isolation) hasTurn(m *entry) bool {
	switch {
	case !m.needsTurn():
		return true
	case m.mustBeAlone() && (len(i.group) > 1 || len(i.ending) > 0):
		return false
	case i.turn == m.lane, m.lane.together:
		return true
	}
	return i.turn == nil && (i.next == nil || i.next == m.lane || !m.lane.isolated())
}

// announce lets m be published, once it is recorded in the database that m is in flight alone,
// or that the messages of its lane are, of which it is the first.
func (i *isolation) announce(m *entry, now time.Time) {
	l := m.lane
	if i.turn != l {
		i.turn, i.group = l, []*lane{l}
		l.sentInTurn, l.turnBegan = 0, now
		i.last = l.number
		if i.next != nil && i.next != l { // it needs no offer; the round goes on with the lane that does
			i.last = (i.next.number + outbox.Lanes - 1) % outbox.Lanes
		}
		i.next = nil
	}
	l.sentInTurn++
	m.state = stateAnnouncing
	l.stale = l.stale || l.together // that several are in flight is recorded until m is
	l.announced, l.written, l.together = m, false, false
}

// sendAnnounced returns the announced message, which is recorded. A write that took long does
// not shorten the time in which the messages of the lane go together.
func (i *isolation) sendAnnounced(l *lane, now time.Time) *entry {
	m := l.announced
	l.announced, l.written = nil, false
	if l.together = !m.mustBeAlone(); l.together {
		l.turnBegan = now
	} else {
		l.alone = m
	}
	return m
}

// passTurn ends a turn when its lanes have had their share, or have nothing to send. The database
// names them until everything of theirs in flight has its outcome; then that is cleared in one task,
// before the next lanes are recorded. Those that wait for longer are recorded meanwhile.
func (e *engine) passTurn(now time.Time) {
	i := &e.isolation
	i.ending = slices.DeleteFunc(i.ending, func(l *lane) bool {
		trusted := l.crashes == 0 // meanwhile: nothing is recorded, and it may send without a pause
		over := !e.live(l) || l.inFlight == 0 || trusted
		l.mustClear = l.mustClear || over && l.stale
		return over
	})
	if i.turn != nil && !slices.ContainsFunc(i.group, func(l *lane) bool { return e.keepsTurn(l, now) }) {
		for _, l := range i.group {
			l.stale = l.stale || l.together || l.mustClear
			if l.together && l.inFlight > 0 {
				i.ending = append(i.ending, l)
			} else {
				l.mustClear = l.stale
			}
			l.together = false
		}
		i.turn, i.group = nil, nil
	}
	if i.turn == nil {
		e.offerTurn(now)
	}
}

// overlapAt returns when the next lanes may have their turn although messages of this one are in
// flight: it has sent for its share, and their outcomes have had that of one lane. Zero: they may
// not, or nobody has the turn.
func (e *engine) overlapAt() time.Time {
	i := &e.isolation
	if i.turn == nil || e.limits.lease == 0 || suspects(i.ending)+suspects(i.group) > mostEnding {
		return time.Time{}
	}
	return i.turn.turnBegan.Add(e.share(len(i.group) + 1))
}

// mayOverlap reports whether that time has come.
func (e *engine) mayOverlap(now time.Time) bool {
	at := e.overlapAt()
	return !at.IsZero() && !now.Before(at)
}

// keepsTurn reports whether the turn goes on because of a lane.
func (e *engine) keepsTurn(l *lane, now time.Time) bool {
	switch {
	case !e.live(l):
		return false
	case l.announced != nil, l.alone != nil, e.tasks.running != nil && e.tasks.running.lane == l: // it may write what is alone
		return true
	case l.isolated() && !l.draining && e.mayKeepTurn(l, now):
		if m := l.ready.next(); m != nil && e.isolation.hasTurn(m) {
			return true
		}
	}
	return l.together && l.inFlight > 0 && !e.mayOverlap(now) // they are still recorded
}

// companions are the lanes that share the turn of a lane with two crashes, from its start. A lane
// with more has its turn alone, and so does a message that must be alone.
func (e *engine) companions(l *lane, now time.Time) (with []*lane) {
	if l.announced == nil || l.announced.mustBeAlone() || l.crashes != isolatedFrom || len(e.isolation.group) > 1 {
		return nil
	}
	for n := 1; n < len(e.lanes) && len(with) < turnLanes-1; n++ {
		o := e.lanes[(l.number+n)%len(e.lanes)]
		if o == nil || o.crashes != isolatedFrom || o.announced != nil || !e.wantsTurn(o, now) || o.ready.next().mustBeAlone() || slices.Contains(e.isolation.ending, o) {
			continue
		}
		with = append(with, o)
	}
	return with
}

// active are the lanes that are not draining, first those with crashes. Where a worker has too many,
// it gives back the last ones: with a lane it would give back what the lane has shown so far, and
// the next worker would begin again.
func (e *engine) active() (lanes []int) {
	var trusted []int
	for number, l := range e.lanes {
		switch {
		case l == nil || l.draining:
		case l.isolated():
			lanes = append(lanes, number)
		default:
			trusted = append(trusted, number)
		}
	}
	return append(lanes, trusted...)
}

// offerTurn lets the lanes that want it take the turn in their order. Otherwise it would go to
// those that the rounds over all lanes happen to come to. One that does not take it is passed
// over.
func (e *engine) offerTurn(now time.Time) {
	i := &e.isolation
	probing := e.probing(now)
	first := func(l *lane) *entry { // what it needs the turn for
		if e.wantsTurn(l, now) {
			return l.ready.next()
		}
		if n := slices.IndexFunc(probing, func(m *entry) bool { return m.lane == l }); n >= 0 {
			return probing[n]
		}
		return nil
	}
	if i.next != nil {
		m := first(i.next)
		if m != nil && m.mustBeAlone() && len(i.ending) > 0 {
			i.offered = now // it has to wait for them
		}
		if m != nil && now.Sub(i.offered) <= e.share(1) {
			return
		}
		i.last, i.next = i.next.number, nil
	}
	for n := range e.lanes {
		l := e.lanes[(i.last+1+n)%len(e.lanes)]
		if l != nil && first(l) != nil {
			i.next, i.offered = l, now
			return
		}
	}
}

// wantsTurn reports whether a lane has something to send next that needs a turn.
func (e *engine) wantsTurn(l *lane, now time.Time) bool {
	if !e.live(l) || !e.mayPublish(l, now) || l.inFlight > 0 || l.isolated() && l.proven(e.limits.window) {
		return false
	}
	m := l.ready.next()
	return m != nil && !m.hollow && m.needsTurn()
}

// turnWrite returns what the lane with the turn has to record, or that nothing of a lane is in
// flight any more.
func (e *engine) turnWrite(now time.Time) *task {
	if l := e.isolation.turn; l != nil && e.live(l) && l.announced != nil {
		if !l.written {
			return e.writeLane(l, now)
		}
		return nil
	}
	for _, l := range e.lanes {
		if l != nil && l.mustClear {
			if c := e.writeLane(l, now); c != nil {
				return c
			}
		}
	}
	return nil
}

// recordAlone records which message of a lane is about to be in flight alone, or that several
// are, of its companions too, or that nothing recorded is any more. First it clears what is
// recorded of other lanes. If that is impossible for one, the others do not wait: at worst it
// counts a crash too many. A companion that cannot be recorded sends nothing in this turn.
func (e *engine) recordAlone(l *lane, now time.Time) *task {
	var id int64
	f := e.fence(l)
	m := l.announced
	switch {
	case m == nil:
	case m.mustBeAlone():
		id = m.ID
	default:
		id = relaystore.WholeLane
	}
	var over []*lane
	var fences []relaystore.Fence
	for _, o := range e.lanes {
		if o != nil && o != l && o.mustClear && !now.Before(o.taskAt) {
			over, fences = append(over, o), append(fences, e.fence(o))
			o.taskAt = now.Add(clearAgain) // the statement may hang, and this task with it
		}
	}
	with := e.companions(l, now)
	e.isolation.group = append(e.isolation.group, with...) // whatever comes of it: that is cleared when the turn ends
	withFences := make([]relaystore.Fence, len(with))
	for i, o := range with {
		withFences[i] = e.fence(o)
		o.stale = true // it may be recorded although no answer comes
	}
	locked, alone := make([]bool, len(over)), make([]bool, len(with))
	return &task{
		lane: l,
		undo: func(taskError) { l.stale = true }, // it may have been recorded anyway
		do: func(ctx taskContext) (func(), error) {
			failed := make([]bool, len(fences))
			for i, o := range fences {
				failed[i] = ctx.store.SetAlone(ctx, o, 0) != nil
			}
			unrecorded := make([]bool, len(with))
			for i, o := range withFences {
				unrecorded[i] = ctx.store.SetAlone(ctx, o, relaystore.WholeLane) != nil
			}
			return func() { locked, alone = failed, unrecorded }, ctx.store.SetAlone(ctx, f, id)
		},
		done: func(now time.Time) {
			for i, o := range over {
				if locked[i] {
					o.taskAt = now.Add(clearAgain)
				} else {
					o.stale, o.mustClear, o.taskAt = false, false, time.Time{}
				}
			}
			for i, o := range with {
				if !alone[i] && e.live(o) && !o.draining {
					o.together, o.stale, o.sentInTurn, o.turnBegan = true, false, 0, now
					l.turnBegan = now // also if it forgot its message meanwhile
				}
			}
			switch {
			case l.announced == m:
				l.written, l.stale, l.mustClear = m != nil, false, false
			case m != nil:
				l.stale, l.mustClear = true, true // the lane forgot it meanwhile
			}
		},
	}
}

// clearAgain is the pause after a record that could not be cleared: the row may be locked.
const clearAgain = time.Second

// crashesOver reports whether a lane whose workers have died has got through a window, or
// has nothing left: then its messages were not the cause.
func (e *engine) crashesOver(l *lane) bool {
	if l.crashes == 0 || l.draining || l.announced != nil || l.alone != nil {
		return false
	}
	return l.proven(e.limits.window) || l.dry && len(l.entries) == 0 && len(l.failing) == 0
}

// proven reports whether enough messages of the lane were deleted or refused to show that they were
// not the cause. Nothing more is published in turns then: the isolation is about to end.
func (l *lane) proven(window int) bool {
	if l.isolated() {
		window = min(window, isolatedMessages)
	}
	return l.through >= window
}

// clearCrashes ends the isolation of lanes.
func (e *engine) clearCrashes(now time.Time) *task {
	if now.Before(e.tasks.crashesAt) {
		return nil
	}
	epochs := map[int]int64{}
	var lanes []*lane
	for number, l := range e.lanes {
		if l != nil && l.loaded && e.crashesOver(l) {
			epochs[number], lanes = l.epoch, append(lanes, l)
		}
	}
	if len(lanes) == 0 {
		return nil
	}
	return &task{
		again: &e.tasks.crashesAt,
		do:    func(ctx taskContext) (func(), error) { return nil, ctx.store.ClearCrashes(ctx, e.limits.owner, epochs) },
		done: func(time.Time) {
			for _, l := range lanes {
				if e.live(l) && l.announced == nil {
					l.crashes, l.through, l.stale, l.mustClear, l.together = 0, 0, false, false, false
				}
			}
		},
	}
}
