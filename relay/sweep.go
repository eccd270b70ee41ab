package relay

import (
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

const (
	// sweepFrom is the number of followers from which a key is swept instead of read.
	sweepFrom = 256
	sweepRows = 5000

	// slowRead is how long reads may take, this many of them in a row, before the busy
	// keys that they pass over are swept. It excludes the time of reads that pass
	// nothing over, and the time of a slow connection. Less is a busy machine.
	slowRead  = 500 * time.Millisecond
	slowReads = 3
	slowWay   = 256 << 10 // bytes a second

	// mostExcused bounds the bytes for which a slow connection excuses a long read.
	mostExcused = 512 << 10
)

// A key with very many messages waiting behind its first must not slow down the reads
// of its lane. It is swept: reads pass over it, and statements in the database move its
// rows to the table parked, without reading them. Its key is already there, or is put
// there as a whole, once nothing of it is in flight: otherwise a message from the
// outbox that failed would be overtaken.

// sweepFollowers sweeps the keys of a lane that have many followers in memory, once the
// first message of the key is retrying: otherwise they would overtake it.
func (l *lane) sweepFollowers() {
	keys := l.followed()
	if len(keys) == 0 || slices.ContainsFunc(l.followers, func(m *entry) bool { return m.moving }) {
		return
	}
	for _, key := range keys {
		c := l.chains[key] // it is retrying, or is about to be
		if c != nil && c.retrying && c.failing == nil && len(c.commands) == 0 {
			l.sweep(key)
		}
	}
}

// followed returns the keys that have many followers in memory.
func (l *lane) followed() (keys []string) {
	if len(l.followers) < l.limits.sweepFrom {
		return nil
	}
	counts := map[string]int{}
	for _, m := range l.followers {
		if counts[m.Key]++; counts[m.Key] == l.limits.sweepFrom {
			keys = append(keys, m.Key)
		}
	}
	return keys
}

// sweep makes reads pass over a retrying key, and forgets the known messages that are to
// be moved behind it.
func (l *lane) sweep(key string) {
	if l.swept == nil {
		l.swept = map[string]bool{}
	}
	l.swept[key] = true
	l.followers = slices.DeleteFunc(l.followers, func(m *entry) bool {
		if m.Key != key || m.moving {
			return false
		}
		l.forget(m)
		return true
	})
}

// baseline measures the last read that passed nothing over.
type baseline struct {
	took    time.Duration
	brought int // bytes
	at      time.Time
}

// excuses returns how long a read of this many bytes may take, whatever it passes over.
// A measurement that is too old does not count.
func (u baseline) excuses(brought int, now time.Time) time.Duration {
	if now.Sub(u.at) > readRarely {
		u = baseline{}
	}
	return u.took + time.Duration(max(0, min(brought, mostExcused)-u.brought))*time.Second/slowWay
}

// sweepSlow sweeps the busy keys that make reads slow. It acts after several slow reads
// in a row, not counting those that pass nothing over. A read that timed out counts as
// slow.
func (e *engine) sweepSlow(r *read, took time.Duration, now time.Time, err error) {
	switch {
	case e.limits.order != OrderPerKey:
	case len(r.Busy) > 0 && (sqlerr.TimedOut(err) || err == nil && took > e.limits.slowRead+e.reads.baseline.excuses(r.brought, now)):
		e.reads.slow++
	case err != nil:
	case len(r.Busy) == 0:
		e.reads.baseline = baseline{took, r.brought, now}
	default:
		e.reads.slow = 0
	}
	if e.reads.slow < slowReads {
		return
	}
	e.reads.slow = 0
	for _, l := range r.lanes {
		if e.live(l) && l.loaded && !l.draining {
			l.stopBusy(r.Busy)
		}
	}
}

// stopBusy stops those of keys that belong to a lane and whose rows make its reads
// slow, so that they can be swept. Messages of such a key that were in memory may have
// been published meanwhile: there are more in the table.
func (l *lane) stopBusy(keys []string) {
	for _, key := range keys {
		if outbox.Lane(key, "") != l.number || l.swept[key] {
			continue
		}
		c := l.chain(key)
		if c.retrying || c.stopped() {
			continue
		}
		c.sweeping, l.stopping = true, true
		for m := c.head; m != nil; m = m.next {
			if m.state == stateReady {
				m.state = stateWaiting
			}
		}
	}
}

// sweepStopped sweeps the stopped keys, once nothing of them is in flight. A key whose
// topic is in trouble continues instead.
func (l *lane) sweepStopped() {
	if !l.stopping { // a lane may have very many keys
		return
	}
	l.stopping = false
	var stopped []string
	for key, c := range l.chains {
		if c.sweeping {
			stopped = append(stopped, key)
		}
	}
	slices.Sort(stopped)
	for _, key := range stopped {
		c := l.chains[key]
		switch {
		case c.head != nil && c.head.state == stateInFlight:
			l.stopping = true
		case c.head != nil && c.head.state != stateWaiting, c.failing != nil, len(c.commands) > 0:
			c.sweeping = false
			l.resume(c)
			l.forgetKey(key, c)
		default:
			c.sweeping = false
			l.startRetrying(c)
			l.sweep(key)
		}
	}
}

// moveSwept moves rows of swept keys of one lane behind their heads.
func (e *engine) moveSwept(now time.Time) *task {
	for range e.lanes {
		e.tasks.sweepLane = (e.tasks.sweepLane + 1) % len(e.lanes)
		l := e.lanes[e.tasks.sweepLane]
		if l == nil || !l.loaded || l.draining || now.Before(l.taskAt) {
			continue
		}
		l.sweepFollowers()
		l.sweepStopped()
		if len(l.swept) == 0 {
			continue
		}
		keys, f := slices.Sorted(maps.Keys(l.swept)), e.fence(l)
		if l.sweepOne {
			at, _ := slices.BinarySearch(keys, l.sweptLast+"\x00")
			keys = []string{keys[at%len(keys)]}
			l.sweptLast = keys[0]
		}
		// Their messages in flight, and confirmed ones, are handled in the outbox.
		var known []outboxstore.Known
		for _, m := range l.entries {
			if !m.retrying && l.swept[m.Key] {
				known = append(known, m.ref().Known())
			}
		}
		moved := 0
		return &task{
			lane: l,
			undo: func(taskError) { l.sweepOne = true },
			do: func(ctx taskContext) (func(), error) {
				n, err := ctx.store.Follow(ctx, f, keys, known, sweepRows)
				return func() { moved = n }, err
			},
			done: func(now time.Time) {
				l.sweepOne = false
				if moved > 0 {
					e.due.lookFromStart(now)
				}
				if moved < sweepRows {
					for _, key := range keys {
						delete(l.swept, key)
					}
					l.dry, l.keyFreed = false, true
					l.loaded = false // which of the keys are retrying now?
				}
			},
		}
	}
	return nil
}
