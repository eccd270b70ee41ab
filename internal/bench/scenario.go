package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"
)

// scenario is a set of sides that run in turn, and the rows that compare them.
type scenario struct {
	id   string
	long bool // takes minutes: runs with -long, or when it is named
	once bool // one round is enough, however many are asked for
	// find is how long the search for the best settings takes on a machine of two cores,
	// and round a round of all sides. They serve to estimate the time left.
	find, round time.Duration
	sides       func(ctx context.Context, b *bench) ([]side, error)
	rows        []row
}

// side is one way to do what a scenario measures.
type side struct {
	name string
	n    int // messages of a run; unless fixed, at most this many
	// fixed is set where n does not depend on how fast the machine is.
	fixed bool
	// run does one run over n messages and returns what was measured, first the messages
	// a second if n is not fixed. It brings everything into the same state before, and
	// checks all messages after, outside of what it measures.
	run func(ctx context.Context, n int) (values, error)
}

// values is what a run has measured.
type values []float64

// row is a line of the table: one value of one side, against one of another.
type row struct {
	id, what    string
	ours, other figure
	unit        string
	goal        goal
}

// figure names a value by the positions of its side and of the value among the side's.
type figure struct{ side, value int }

const (
	// warmUpShare of a side's messages make its first run, which is not measured.
	warmUpShare = 10
	// runFor bounds the messages of a run to what takes about this long at the speed of
	// the warm-up, so that a slow side does not take many times as long. Rates are
	// compared.
	runFor = 4 * time.Second
	// wholeLimit is for all rows that are not long. On a slow machine runs become shorter
	// to stay below it, but not shorter than leastRun; past it, one round is enough.
	wholeLimit = 9 * time.Minute
	leastRun   = time.Second
	// runLimit ends a run that hangs; a run of a long scenario may take longRunLimit.
	runLimit     = 3 * time.Minute
	longRunLimit = 15 * time.Minute
)

func (s scenario) rowIDs() []string {
	ids := make([]string, len(s.rows))
	for i, r := range s.rows {
		ids[i] = r.id
	}
	return ids
}

func (s scenario) pairs(asked int) int {
	if s.once {
		return 1
	}
	return asked
}

// measure runs a scenario and compares its sides.
func (b *bench) measure(ctx context.Context, s scenario) (results []result, err error) {
	b.progress.begin(s)
	defer func() {
		for _, end := range slices.Backward(b.ends) {
			err = errors.Join(err, end())
		}
		b.ends = nil
	}()
	sides, err := s.sides(ctx, b)
	if err != nil {
		return nil, err
	}
	b.progress.done += s.find
	measured, err := b.rounds(ctx, s.pairs(b.pairs), sides)
	if err != nil {
		return nil, err
	}
	for _, r := range s.rows {
		res := r.compare(sides, measured)
		results = append(results, res)
		b.progress.say("%s: %s, ratio %s; %s", r.id, human(res.Ours)+" "+r.unit, human(res.Ratio), res.goalText())
	}
	return results, nil
}

// rounds warms every side up, and then lets them run in turn; who begins changes from
// round to round. It returns the values of each side, by round.
func (b *bench) rounds(ctx context.Context, pairs int, sides []side) ([][]values, error) {
	measured := make([][]values, len(sides))
	for i := range sides {
		s := &sides[i]
		few := max(1, s.n/warmUpShare)
		v, err := b.runSide(ctx, *s, few)
		if err != nil {
			return nil, fmt.Errorf("%s: warm-up: %w", s.name, err)
		}
		if !s.fixed {
			s.n = min(s.n, max(few, int(v[0]*b.progress.runFor().Seconds())))
		}
		b.progress.ran(warmUp, *s, v)
	}
	for round := range pairs {
		if round > 0 && b.progress.late() {
			break
		}
		for i := range sides {
			at := (i + round) % len(sides)
			v, err := b.runSide(ctx, sides[at], sides[at].n)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", sides[at].name, err)
			}
			measured[at] = append(measured[at], v)
			b.progress.ran(fmt.Sprintf("round %d of %d", round+1, pairs), sides[at], v)
		}
	}
	return measured, nil
}

// atEnd calls end when the scenario has been measured.
func (b *bench) atEnd(end func() error) { b.ends = append(b.ends, end) }

func (b *bench) runSide(ctx context.Context, s side, n int) (values, error) {
	limit := runLimit
	if b.progress.now.long {
		limit = longRunLimit
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	runtime.GC() // no side pays for the garbage of the one before it
	return s.run(ctx, n)
}

// best lets every setting run in turn over trial messages, twice, and returns the side of n
// messages with the setting of the highest sum.
func best[S any](ctx context.Context, b *bench, settings []S, trial, n int, sized func(n int, setting S) side) (side, error) {
	sums := make([]float64, len(settings))
	for range 2 {
		for i, setting := range settings {
			s := sized(trial, setting)
			v, err := b.runSide(ctx, s, trial)
			if err != nil {
				return side{}, fmt.Errorf("find the best settings: %s: %w", s.name, err)
			}
			sums[i] += v[0]
		}
	}
	found := sized(n, settings[slices.Index(sums, slices.Max(sums))])
	b.progress.say("the best settings: %s", found.name)
	return found, nil
}

const warmUp = "warm-up"

// progress reports how far the run is.
type progress struct {
	to                   io.Writer
	began, measuring     time.Time
	pairs, scenarios, at int
	unlimited            bool // has long scenarios, or more rounds than usual
	now                  scenario
	total, done          time.Duration // by the estimates
}

func newProgress(to io.Writer, chosen []scenario, pairs int) *progress {
	p := &progress{to: to, began: time.Now(), pairs: pairs, scenarios: len(chosen), unlimited: pairs > usualPairs}
	for _, s := range chosen {
		p.total += p.estimate(s)
		p.unlimited = p.unlimited || s.long
	}
	return p
}

// estimate counts the warm-up as half a round.
func (p *progress) estimate(s scenario) time.Duration {
	return s.find + s.round*time.Duration(s.pairs(p.pairs)) + s.round/2
}

func (p *progress) begin(s scenario) {
	if p.at == 0 {
		p.measuring = time.Now()
	}
	p.at++
	p.now = s
	p.say("%d of %d: %s; about %v left", p.at, p.scenarios, s.id, p.left())
}

func (p *progress) ran(when string, s side, v values) {
	sides := 1
	for _, r := range p.now.rows {
		sides = max(sides, r.ours.side+1, r.other.side+1)
	}
	share := p.now.round / time.Duration(sides)
	if when == warmUp {
		share /= 2
	}
	p.done += share
	text := ""
	for _, value := range v {
		text += " " + human(value)
	}
	p.say("%d of %d: %s, %s: %s:%s; about %v left", p.at, p.scenarios, p.now.id, when, s.name, text, p.left())
}

// left scales the estimates to the speed of this machine, once that is known.
func (p *progress) left() time.Duration {
	left, took := p.total-p.done, time.Since(p.measuring)
	const enough = 20 * time.Second
	if p.done > enough {
		left = time.Duration(float64(left) * float64(took) / float64(p.done))
	}
	return max(0, left).Round(time.Second)
}

// runFor is shorter than usual once the rest would end after the limit.
func (p *progress) runFor() time.Duration {
	room, left := wholeLimit-time.Since(p.began), p.left()
	if p.unlimited || room >= left {
		return runFor
	}
	return max(leastRun, time.Duration(float64(runFor)*float64(room)/float64(left)))
}

// late is true past the limit.
func (p *progress) late() bool { return !p.unlimited && time.Since(p.began) > wholeLimit }

func (p *progress) say(format string, args ...any) {
	fmt.Fprintf(p.to, "%4.0f s  "+format+"\n", append([]any{time.Since(p.began).Seconds()}, args...)...)
}

// perSecond is the one value of a run that took so long.
func perSecond(n int, took time.Duration) values { return values{float64(n) / took.Seconds()} }
