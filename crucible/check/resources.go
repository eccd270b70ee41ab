package check

import (
	"fmt"
	"slices"
)

// What a process may use at the end beyond the most that it used before.
const (
	moreGoroutines = 100
	moreFiles      = 30
	moreHeap       = 128 << 20
)

// resources is C11: at the end, processes use what they used at first, and the database has
// logged no error that nothing explains.
func (c *index) resources() Result {
	r := Result{Checker: "C11", Promise: "resources"}
	for name, usage := range c.Processes {
		if len(usage) < 2 {
			continue
		}
		base, last := usage[0], usage[len(usage)-1]
		for _, u := range usage[:min(5, len(usage))] { // the first ten seconds
			base.Goroutines, base.Files, base.Heap = max(base.Goroutines, u.Goroutines), max(base.Files, u.Files), max(base.Heap, u.Heap)
		}
		if last.Goroutines > base.Goroutines+moreGoroutines {
			r.found("%s ends with %d goroutines, and began with %d", name, last.Goroutines, base.Goroutines)
		}
		if last.Files > base.Files+moreFiles {
			r.found("%s ends with %d open files, and began with %d", name, last.Files, base.Files)
		}
		if last.Heap > base.Heap+moreHeap {
			r.found("%s ends with a heap of %d MiB, and began with %d", name, last.Heap>>20, base.Heap>>20)
		}
	}
	for _, text := range c.Unclean {
		r.found("%s", text)
	}
	for _, line := range c.Log {
		r.found("nothing explains this error of the database: %s", line)
	}
	return r
}

// reached is C12: a run that did not reach the rare states proves nothing.
func (c *index) reached() Result {
	r := Result{Checker: "C12", Promise: "rare states reached"}
	for _, state := range slices.Sorted(slices.Values(c.Wanted)) {
		if c.States[state] == 0 {
			r.found("not reached: %s", state)
		}
	}
	return r
}

// truthful is C13: what an operator is shown is what is there.
func (c *index) truthful() Result {
	r := Result{Checker: "C13", Promise: "truthful operations"}
	if c.Listed == nil {
		return r
	}
	counted := map[string]int{}
	for _, l := range c.Letters {
		counted[l.State]++
	}
	listed := 0
	for _, state := range []string{"dead", "held", "replaying", "discarding", "replayed", "discarded"} {
		listed += c.Listed[state]
		if c.Listed[state] != counted[state] {
			r.found("%d dead letters in state %s are listed, and there are %d", c.Listed[state], state, counted[state])
		}
	}
	r.Note = fmt.Sprintf("%d dead letters listed", listed)
	return r
}
