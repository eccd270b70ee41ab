package relay

import (
	"slices"
	"time"
)

// lookForCommands reads the operators' commands for dead letters of the lanes.
func (e *engine) lookForCommands(now time.Time) *chore {
	if now.Before(e.commandsAt) {
		return nil
	}
	e.sweep(now) // this interval is enough
	numbers, _ := e.numbers(func(l *lane) bool { return l.loaded && !l.draining })
	var found []command
	return &chore{
		again: &e.commandsAt,
		do: func(ctx choreContext) (func(), error) {
			if len(numbers) == 0 {
				return nil, nil
			}
			there, err := ctx.store.commands(ctx, numbers, maxCommands)
			return func() { found = there }, err
		},
		done: func(now time.Time) {
			e.commandsAt = now.Add(commandsEvery)
			for _, c := range found {
				if l := e.lanes[c.lane]; l != nil && l.loaded && !l.draining {
					e.receive(l, c)
				}
			}
		},
	}
}

// receive accepts a command. It is carried out when nothing of its key is in flight,
// and nothing of the key goes out before.
func (e *engine) receive(l *lane, cmd command) {
	if cmd.key == "" || l.order == OrderNone {
		if !slices.Contains(l.letters, cmd.letter) {
			l.letters = append(l.letters, cmd.letter)
		}
		return
	}
	c := l.chain(cmd.key)
	if slices.Contains(c.letters, cmd.letter) {
		return
	}
	c.letters = append(c.letters, cmd.letter)
	if !slices.Contains(l.commanded, cmd.key) {
		l.commanded = append(l.commanded, cmd.key)
	}
	for m := c.head; m != nil; m = m.next {
		switch m.state {
		case withheld, suspected:
			e.purge(func(o *entry) bool { return o == m })
			m.state, m.failedAt = waiting, 0
		case ready, again:
			m.state = waiting
		default:
		}
	}
}

// quiet reports whether nothing of a key is in flight or about to be.
func (c *chain) quiet() bool {
	for m := c.head; m != nil; m = m.next {
		if m.state != waiting {
			return false
		}
	}
	return c.failing == nil
}

// carryOut carries out the commands of one lane that can be done now.
func (e *engine) carryOut(l *lane) *chore {
	letters, most := slices.Clone(l.letters), maxCommands
	if l.oneByOne {
		letters, most = letters[:min(1, len(letters))], 1
	}
	unkeyed, f := len(letters), e.fence(l)
	var keys []string
	for _, key := range l.commanded {
		if c := l.chains[key]; c != nil && c.quiet() && len(letters) < most {
			letters, keys = append(letters, c.letters...), append(keys, key)
		}
	}
	if len(letters) == 0 {
		return nil
	}
	var parked, unparked []parkedKey
	return &chore{
		lane: l,
		undo: func(choreError) { // the first ones yield to the others
			l.oneByOne = true
			l.letters = rotated(l.letters)
			l.commanded = rotated(l.commanded)
		},
		do: func(ctx choreContext) (func(), error) {
			there, gone, err := ctx.store.carryOut(ctx, f, letters)
			return func() { parked, unparked = there, gone }, err
		},
		done: func(now time.Time) {
			e.parkedDue(now)
			e.commandsAt = now // there may be more
			l.letters = slices.Delete(l.letters, 0, min(unkeyed, len(l.letters)))
			l.commanded = slices.DeleteFunc(l.commanded, func(key string) bool { return slices.Contains(keys, key) })
			for _, key := range keys {
				if c := l.chains[key]; c != nil {
					c.letters = nil
				}
			}
			if l.order != OrderNone {
				for _, k := range parked {
					if k.key != "" {
						l.park(l.chain(k.key))
					}
				}
				for _, k := range unparked {
					l.unpark(k.key)
				}
			}
			for _, key := range keys {
				if c := l.chains[key]; c != nil {
					l.goOn(c)
					l.tidy(key, c)
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
