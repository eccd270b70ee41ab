package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"
)

// side is one of the parties of a row.
type side struct {
	name string
	n    int // messages of a run
	// run does one run over n messages and returns the measured value. It
	// brings everything into the same state before, and checks all messages
	// after, outside of what it measures.
	run func(ctx context.Context, n int) (float64, error)
}

// warmUpShare of a side's messages make its unmeasured first run.
const warmUpShare = 10

// runLimit ends a run that hangs.
const runLimit = 3 * time.Minute

// rounds warms every side up and then lets them run in turn, n times; who begins
// changes from round to round. It returns the values of each side, by round.
func (b *bench) rounds(ctx context.Context, id, unit string, sides ...side) ([][]float64, error) {
	values := make([][]float64, len(sides))
	for _, s := range sides {
		if _, err := b.runSide(ctx, s, s.n/warmUpShare); err != nil {
			return nil, fmt.Errorf("%s: %s: warm-up: %w", id, s.name, err)
		}
	}
	for round := range b.pairs {
		for i := range sides {
			at := (i + round) % len(sides)
			s := sides[at]
			value, err := b.runSide(ctx, s, s.n)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", id, s.name, err)
			}
			values[at] = append(values[at], value)
			b.say("%-20s round %d of %d   %-44s %12s %s", id, round+1, b.pairs, s.name, human(value), unit)
		}
	}
	return values, nil
}

func (b *bench) runSide(ctx context.Context, s side, n int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	// No side pays for the garbage of the one before it.
	runtime.GC()
	return s.run(ctx, n)
}

// best lets every candidate run in turn, twice, and returns the index of the one
// with the highest sum.
func (b *bench) best(ctx context.Context, what, unit string, candidates []side) (int, error) {
	sums := make([]float64, len(candidates))
	for range 2 {
		for i, c := range candidates {
			value, err := b.runSide(ctx, c, c.n)
			if err != nil {
				return 0, fmt.Errorf("find the best %s: %s: %w", what, c.name, err)
			}
			sums[i] += value
			b.say("%-35s %-44s %12s %s", "find the best "+what, c.name, human(value), unit)
		}
	}
	at := slices.Index(sums, slices.Max(sums))
	b.say("the best %s is %s", what, candidates[at].name)
	return at, nil
}

func perSecond(n int, took time.Duration) float64 { return float64(n) / took.Seconds() }

// median of values, of which there is at least one.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// ratios of the rounds: what happened to the machine in a round happened to
// both sides.
func ratios(ours, other []float64) []float64 {
	out := make([]float64, len(ours))
	for i := range ours {
		out[i] = ours[i] / other[i]
	}
	return out
}
