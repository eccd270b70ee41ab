// Package nemesis decides which faults happen when. The same seed gives the same plan.
package nemesis

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"
)

// Kind is a kind of fault.
type Kind struct {
	Name     string
	Targets  []string      // one is drawn for each fault
	Min, Max time.Duration // how long it lasts

	// Alone names what the fault takes for itself: two faults of the same name do not overlap.
	Alone string
}

// Fault is a planned fault.
type Fault struct {
	Kind, Target string
	At           time.Duration // since the start of the run
	For          time.Duration
}

// A run alternates between storms, in which faults overlap, and calms, in which everything has
// to move again.
const (
	Storm = 12 * time.Second
	Calm  = 10 * time.Second
	lead  = 3 * time.Second // before the first storm

	// usualSpacing is the time between the starts of two faults, on average. It is shorter in a
	// run in which not every kind would have its turn.
	usualSpacing = 700 * time.Millisecond
)

// Plan returns the faults of a run, by their starts. Each kind has its turn before another has
// its second.
func Plan(seed uint64, total time.Duration, kinds []Kind) []Fault {
	r := rand.New(rand.NewPCG(seed, 2))
	storms := 1 + max(0, total-lead-Storm)/(Storm+Calm)
	spacing := max(50*time.Millisecond, min(usualSpacing, storms*Storm*9/10/time.Duration(max(1, len(kinds)))))
	var plan []Fault
	var deck []Kind
	until := map[string]time.Duration{} // when what a kind takes for itself is free
	for begin := lead; begin+Storm <= total; begin += Storm + Calm {
		for at := begin; at < begin+Storm; at += spacing/2 + time.Duration(r.Int64N(int64(spacing))) {
			if len(deck) == 0 {
				deck = slices.Clone(kinds)
				r.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
			}
			i := slices.IndexFunc(deck, func(k Kind) bool { return k.Alone == "" || until[k.Alone] <= at })
			if i < 0 {
				continue // all that are left have to wait for one another
			}
			kind := deck[i]
			deck = slices.Delete(deck, i, i+1)
			fault := Fault{Kind: kind.Name, Target: kind.Targets[r.IntN(len(kind.Targets))], At: at}
			fault.For = kind.Min + time.Duration(r.Int64N(int64(kind.Max-kind.Min)+1))
			if kind.Alone != "" {
				until[kind.Alone] = at + fault.For + pause
			}
			plan = append(plan, fault)
		}
	}
	slices.SortStableFunc(plan, func(a, b Fault) int { return cmp.Compare(a.At, b.At) })
	return plan
}

const pause = 2 * time.Second // for healing
