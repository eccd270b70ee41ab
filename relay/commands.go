package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// lookForCommands reads the operators' commands for dead letters of the lanes.
func (e *engine) lookForCommands(now time.Time) *task {
	if now.Before(e.tasks.commandsAt) {
		return nil
	}
	e.circuits.sweep(now) // this interval is enough
	e.gatherPaused()
	numbers, _ := e.numbers(func(l *lane) bool { return l.loaded && !l.draining })
	var found []relaystore.Command
	return &task{
		again: &e.tasks.commandsAt,
		do: func(ctx taskContext) (func(), error) {
			if len(numbers) == 0 {
				return nil, nil
			}
			there, err := ctx.store.Commands(ctx, numbers, maxCommands)
			return func() { found = there }, err
		},
		done: func(now time.Time) {
			e.tasks.commandsPause = e.commandsPause(len(found) > 0)
			e.tasks.commandsAt = now.Add(e.tasks.commandsPause)
			for _, c := range found {
				if l := e.lanes[c.Lane]; l != nil && l.loaded && !l.draining {
					e.receive(l, c)
				}
			}
		},
	}
}

// commandsPause returns the time until the next look. It grows at rest.
func (e *engine) commandsPause(found bool) time.Duration {
	if found || !e.atRest() {
		return commandsEvery
	}
	return min(max(2*e.tasks.commandsPause, commandsEvery), commandsRest)
}

// receive accepts a command. It is carried out when nothing of its key is in flight,
// and nothing of the key is published before.
func (e *engine) receive(l *lane, cmd relaystore.Command) {
	if cmd.Key == "" || l.order == OrderNone {
		if !slices.Contains(l.commands, cmd.DeadLetter) {
			l.commands = append(l.commands, cmd.DeadLetter)
		}
		return
	}
	c := l.chain(cmd.Key)
	if slices.Contains(c.commands, cmd.DeadLetter) {
		return
	}
	c.commands = append(c.commands, cmd.DeadLetter)
	if !slices.Contains(l.commandedKeys, cmd.Key) {
		l.commandedKeys = append(l.commandedKeys, cmd.Key)
	}
	for m := c.head; m != nil; m = m.next {
		switch m.state {
		case stateWithheld, stateUnclear:
			e.purge(func(o *entry) bool { return o == m })
			m.state, m.failedAt = stateWaiting, 0
		case stateReady, stateAgain:
			m.state = stateWaiting
		default:
		}
	}
}

// quiet reports whether nothing of a key is in flight or about to be.
func (c *chain) quiet() bool {
	for m := c.head; m != nil; m = m.next {
		if m.state != stateWaiting {
			return false
		}
	}
	return c.failing == nil
}

// carryOut carries out the commands of one lane that can be done now.
func (e *engine) carryOut(l *lane) *task {
	letters, keys := slices.Clone(l.commands), slices.DeleteFunc(slices.Clone(l.commandedKeys), func(key string) bool {
		c := l.chains[key]
		return c == nil || !c.quiet()
	})
	switch {
	case !l.oneByOne:
	case len(keys) > 0 && (l.keyNext || len(letters) == 0):
		letters, keys = nil, keys[:1]
	default:
		letters, keys = letters[:min(1, len(letters))], nil
	}
	unkeyed, keyed, f := len(letters), 0, e.fence(l)
	for ; keyed < len(keys) && len(letters) < maxCommands; keyed++ {
		letters = append(letters, l.chains[keys[keyed]].commands...)
	}
	keys = keys[:keyed]
	if len(letters) == 0 {
		return nil
	}
	var retrying, ended []relaystore.Key
	return &task{
		lane: l,
		undo: func(taskError) { // the first ones yield to the others
			l.oneByOne, l.keyNext = true, !l.keyNext
			if unkeyed > 0 {
				l.commands = rotated(l.commands)
			}
			if len(keys) > 0 {
				l.commandedKeys = rotated(l.commandedKeys)
			}
		},
		do: func(ctx taskContext) (func(), error) {
			there, gone, err := ctx.store.CarryOut(ctx, f, letters)
			return func() { retrying, ended = there, gone }, err
		},
		done: func(now time.Time) {
			e.due.lookFromStart(now)
			e.tasks.commandsAt = now // there may be more
			l.commands = slices.Delete(l.commands, 0, min(unkeyed, len(l.commands)))
			l.commandedKeys = slices.DeleteFunc(l.commandedKeys, func(key string) bool { return slices.Contains(keys, key) })
			for _, key := range keys {
				if c := l.chains[key]; c != nil {
					c.commands = nil
				}
			}
			if l.order != OrderNone {
				for _, k := range retrying {
					if k.Key != "" {
						l.startRetrying(l.chain(k.Key))
					}
				}
				for _, k := range ended {
					l.endRetrying(k.Key)
				}
			}
			for _, key := range keys {
				if c := l.chains[key]; c != nil {
					l.resume(c)
					l.forgetKey(key, c)
				}
			}
		},
	}
}

// rotated returns a list with its first element moved to the end.
func rotated[T any](list []T) []T {
	if len(list) < 2 {
		return list
	}
	return append(slices.Clone(list[1:]), list[0])
}
