package relaymodel

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

var each = flag.Bool("each", false, "visit the states with each kind of fault, not only with crashes: 10 million")

// found is what a search has found.
type found struct {
	states, steps int
	broken        string  // a promise that some state breaks
	path          []state // to it
	stuck         int     // states from which not everything can be delivered any more
}

// explore visits every state, the nearest ones first. It ends at the first one that breaks a
// promise.
func (c *scene) explore() found {
	numbers := map[state]int32{}
	var queue []state
	var before [][]int32 // the states that each one can follow; the nearest to the start is first
	visit := func(s state, from int32) {
		s = s.canonical()
		n, known := numbers[s]
		if !known {
			n = int32(len(queue))
			numbers[s] = n
			queue, before = append(queue, s), append(before, nil)
		}
		if from >= 0 {
			before[n] = append(before[n], from)
		}
	}
	f := found{}
	visit(state{left: c.budget}, -1)
	for i := int32(0); int(i) < len(queue) && f.broken == ""; i++ {
		s := queue[i]
		f.broken = c.broken(&s)
		c.next(s, func(n state, overtaken bool) {
			if overtaken && f.broken == "" {
				f.broken = "order: a message has overtaken one of its key"
			}
			f.steps++
			visit(n, i)
		})
		if f.broken != "" {
			for at := i; ; at = before[at][0] {
				f.path = append(f.path, queue[at])
				if len(before[at]) == 0 {
					break
				}
			}
			slices.Reverse(f.path)
		}
	}
	f.states = len(queue)
	if f.broken == "" {
		f.stuck = stuck(queue, before)
	}
	return f
}

// stuck returns the number of states from which no state can be reached in which nothing is owed.
func stuck(queue []state, before [][]int32) int {
	reaches := make([]bool, len(queue))
	var open []int32
	for i := range queue {
		if queue[i].done() {
			reaches[i] = true
			open = append(open, int32(i))
		}
	}
	n := len(open)
	for len(open) > 0 {
		last := open[len(open)-1]
		open = open[:len(open)-1]
		for _, b := range before[last] {
			if !reaches[b] {
				reaches[b] = true
				n++
				open = append(open, b)
			}
		}
	}
	return len(queue) - n
}

// The messages: two of a key in a lane and one in another; three in a lane, of two keys, whose
// ids do not commit in order.
var layouts = map[string]scene{
	"two lanes": {lane: [messages]int{0, 0, 1}, key: [messages]int{0, 0, 1}},
	"two keys":  {lane: [messages]int{0, 0, 0}, key: [messages]int{0, 1, 0}},
}

func TestModel_KeepsItsPromisesInEveryState(t *testing.T) {
	t.Parallel()
	budgets := []budget{{crashes: 1}}
	if *each || testserver.Long() {
		budgets = append(budgets, budget{releases: 1}, budget{lapses: 1, refusals: 1}, budget{losses: 1, refusals: 1}, budget{pauses: 1})
	}
	if testserver.Long() { // 40 million states, in 10 GB
		budgets = append(budgets, budget{crashes: 1, refusals: 1}, budget{pauses: 1, refusals: 1}, budget{crashes: 1, losses: 1}, budget{losses: 2, refusals: 1})
	}
	for name, c := range layouts {
		for _, faults := range budgets {
			t.Run(name, func(t *testing.T) {
				c := c
				c.budget = faults
				f := c.explore()
				if f.broken != "" {
					t.Errorf("%s, after these states:", f.broken)
					for _, s := range f.path {
						t.Logf("%+v", s)
					}
				}
				if f.stuck > 0 {
					t.Errorf("in %d states something is owed for ever", f.stuck)
				}
				t.Logf("%s: %d states, %d steps, faults %+v", name, f.states, f.steps, faults)
			})
		}
	}
}

// Every rule is needed: without it, some state breaks a promise.
func TestModel_BreaksWithoutARule(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		layout string
		rules
		budget
		want string
	}{
		"moves are not fenced":                       {"two lanes", rules{noFence: true}, budget{pauses: 1, refusals: 1}, "dead and delivered"},
		"leases are not checked before a publish":    {"two lanes", rules{noTrust: true}, budget{pauses: 1, refusals: 1}, "order"},
		"rows are deleted before the confirm":        {"two lanes", rules{deleteEarly: true}, budget{}, "loss"},
		"reads go on behind the last id":             {"two keys", rules{readAhead: true}, budget{}, "order"},
		"a row is forgotten when it is deleted":      {"two lanes", rules{forgetAtOnce: true}, budget{}, "repeated"},
		"two messages of a key are sent together":    {"two lanes", rules{keysSideBySide: true}, budget{losses: 1}, "order"},
		"an unknown outcome is taken for a refusal":  {"two lanes", rules{unknownIsRefusal: true}, budget{losses: 1}, "dead and delivered"},
		"an unknown outcome is taken for a confirm":  {"two lanes", rules{lostConfirmLoses: true}, budget{losses: 1}, "loss"},
		"dead letters do not say what may have been": {"two lanes", rules{letterSaysNothing: true}, budget{losses: 1, refusals: 1}, "dead and delivered"},
		"leases of dead workers do not expire":       {"two lanes", rules{keepLeases: true}, budget{crashes: 1}, "stuck"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := layouts[c.layout]
			s.rules, s.budget = c.rules, c.budget
			f := s.explore()
			if f.stuck > 0 {
				f.broken = fmt.Sprintf("stuck: something is owed for ever in %d states", f.stuck)
			}
			if !strings.HasPrefix(f.broken, c.want) {
				t.Errorf("found %q in %d states, want %q", f.broken, f.states, c.want)
			}
			t.Logf("%s, after %d steps, among %d states", f.broken, len(f.path), f.states)
		})
	}
}
