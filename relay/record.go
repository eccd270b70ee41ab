package relay

import (
	"context"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// recordFailures records the failures of one lane, and moves followers.
func (e *engine) recordFailures(l *lane) *task {
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
	failures := make([]relaystore.Failure, len(failed))
	for i, m := range failed {
		m.moving = true
		failures[i] = *m.failure
	}
	refs, f := entryRefs(followers), e.fence(l)
	for _, m := range followers {
		m.moving = true
	}
	return &task{
		lane: l, failures: failures,
		undo: func(taskError) {
			l.oneByOne = true
			for _, m := range slices.Concat(failed, followers) {
				m.moving = false
			}
		},
		do: func(ctx taskContext) (func(), error) {
			for i := range failures {
				failures[i].Fingerprint = dlqstore.Fingerprint("relay", failures[i].Class, failures[i].Text, failures[i].MessageID)
			}
			return nil, ctx.store.Fail(ctx, f, failures, refs)
		},
		done: func(now time.Time) {
			l.followAt = now.Add(followLinger)
			moved := func(m *entry) bool { return m.moving }
			l.failing = slices.DeleteFunc(l.failing, moved)
			l.followers = slices.DeleteFunc(l.followers, moved)
			for _, m := range followers {
				l.forget(m)
			}
			if len(followers) > 0 {
				l.dry, l.keyFreed = false, true // there may be more of their keys
				// A former owner may have deleted the rows that they were moved behind.
				e.due.lookFromStart(now)
			}
			for _, m := range failed {
				l.forget(m)
				e.recorded(m, now)
			}
		},
	}
}

// recorded continues after a failure has been recorded.
func (e *engine) recorded(m *entry, now time.Time) {
	l := m.lane
	key := l.orderKey(m)
	switch m.failure.Fate {
	case relaystore.FateRetry:
		e.due.lookFromStart(now.Add(m.failure.RetryIn))
	case relaystore.FateDeadLetter:
		if m.retrying {
			e.due.lookFromStart(now)
			l.loaded = l.loaded && key == "" // was it the last retrying one of its key?
		}
	case relaystore.FateHoldKey:
	}
	if m.late {
		l.loaded = false // is anything of its key retrying?
	}
	c := l.chains[key]
	if key == "" || c == nil {
		return
	}
	if c.failing == m {
		c.failing = nil
	}
	l.resume(c)
	l.forgetKey(key, c)
}

func entryRefs(entries []*entry) []outboxstore.Ref {
	refs := make([]outboxstore.Ref, len(entries))
	for i, m := range entries {
		refs[i] = m.ref()
	}
	return refs
}

// writeOneLane returns what a lane has to write; the lanes take turns.
func (e *engine) writeOneLane(now time.Time) *task {
	for range e.lanes {
		e.tasks.lane = (e.tasks.lane + 1) % len(e.lanes)
		if l := e.lanes[e.tasks.lane]; l != nil {
			if c := e.writeLane(l, now); c != nil {
				return c
			}
		}
	}
	return nil
}

// writeLane returns what a lane has to write, or nil.
func (e *engine) writeLane(l *lane, now time.Time) *task {
	if !l.loaded && len(l.failing) == 0 || now.Before(l.taskAt) {
		return nil
	}
	switch {
	case e.setAside(l):
		return e.recordFailures(l)
	case l.mustClear, l.announced != nil && !l.written:
		return e.recordAlone(l, now)
	case (len(l.failing) > 0 || l.mayFollow(now)) && !l.restarting:
		if l.commandsNext = !l.commandsNext; !l.commandsNext {
			if c := e.carryOut(l); c != nil {
				return c
			}
		}
		return e.recordFailures(l)
	case len(l.commands) > 0 || len(l.commandedKeys) > 0:
		return e.carryOut(l)
	}
	return nil
}

// mayFollow reports whether followers are worth a statement now.
func (l *lane) mayFollow(now time.Time) bool {
	return len(l.followers) > 0 && !l.draining && (len(l.followers) >= maxFollowers/5 || !now.Before(l.followAt))
}

// removeRetried deletes confirmed retrying messages. If one of them cannot be deleted,
// for example because another transaction has locked it, the batch yields to others and
// is retried in smaller parts.
func (e *engine) removeRetried(now time.Time) *task {
	if len(e.tasks.retried) == 0 || now.Before(e.tasks.retriedAt) {
		return nil
	}
	if e.tasks.retriedMost == 0 {
		e.tasks.retriedMost = maxRetried
	}
	n := min(len(e.tasks.retried), e.limits.removeRows, e.tasks.retriedMost)
	rows := slices.Clone(e.tasks.retried[:n])
	refs := entryRefs(rows)
	var ended []relaystore.Key
	return &task{
		again: &e.tasks.retriedAt,
		undo: func(kind taskError) {
			if kind == taskImpossible {
				e.tasks.retried = append(slices.Delete(e.tasks.retried, 0, n), rows...)
				e.tasks.retriedMost = max(1, n/2)
				rows[0].lane.putOff = rows[0].lane.putOff || n == 1
			}
		},
		do: func(ctx taskContext) (func(), error) {
			var keys []relaystore.Key
			err := ctx.moveOrDelete(func(c context.Context, move bool) (int, error) {
				removal, err := ctx.store.Remove(c, refs, move)
				keys = append(keys, removal.Ended...)
				return removal.Rows, err
			})
			return func() { ended = keys }, err
		},
		done: func(now time.Time) {
			e.tasks.retried = slices.Delete(e.tasks.retried, 0, n)
			e.tasks.retriedMost = min(2*e.tasks.retriedMost, maxRetried)
			for _, m := range rows {
				m.lane.forget(m)
				delete(m.lane.unsure, m.rowID())
				if m.retrying { // otherwise its removal has counted it
					m.lane.through++
				}
			}
			for _, k := range ended {
				if l := e.lanes[k.Lane]; l != nil && l.loaded {
					l.endRetrying(k.Key)
				}
			}
			e.due.lookFromStart(now)
		},
	}
}
