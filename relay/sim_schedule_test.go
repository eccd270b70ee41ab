package relay

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// simulate runs the schedule of a seed to its end.
func simulate(seed uint64) *simulation {
	s := newSimulation(seed)
	for range 600 {
		s.step()
	}
	s.faults = false
	for i := 0; i < 60_000 && !s.quiet(); i++ {
		if len(s.open) > 0 {
			s.end()
		}
		s.step()
	}
	return s
}

// A seed that fails is of use only if it fails again.
func TestEngine_ASeedRepeatsItsSchedule(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testserver.Rounds(3, 10)) {
		a, b := simulate(seed), simulate(seed)
		sameRow := func(x, y *simRow) bool { return x.ID == y.ID }
		if !a.now.Equal(b.now) || a.rng.Uint64() != b.rng.Uint64() || !slices.EqualFunc(a.wire, b.wire, sameRow) || !maps.Equal(a.stats, b.stats) {
			t.Errorf("seed %d: two schedules, %d messages until %v and %d until %v", seed, len(a.wire), a.now, len(b.wire), b.now)
		}
	}
}

func TestEngine_KeepsItsPromisesUnderAnySchedule(t *testing.T) {
	t.Parallel()
	totals := map[string]int{}
	for n := range *schedules {
		seed := *firstSeed + uint64(n) //nolint:gosec // small
		s := simulate(seed)
		for _, problem := range s.problems() {
			t.Errorf("seed %d: %s", seed, problem)
		}
		if t.Failed() {
			t.FailNow()
		}
		for what, n := range s.stats {
			totals[what] += n
		}
		totals["rows"] += len(s.rows)
		totals["late rows"] += s.late
		for _, r := range s.rows {
			totals["repeats"] += max(0, r.copies-1)
		}
		totals["letters"] += len(s.parking.letters)
	}
	t.Logf("%d schedules: %v", *schedules, totals)
	for _, what := range []string{"late rows", "takeovers", "crashes", "expired", "failures", "lost confirms", "repeats", "outages", "refusals", "killed", "letters", "letters of what was delivered", "not released", "set aside", "frozen", "fenced", "later term", "late confirms", "interruptions", "locked", "postponed", "hollow", "swept", "ahead", "paused", "kept while paused", "turns that overlap"} {
		if totals[what] < *schedules/60 {
			t.Errorf("only %d %s: the schedules are too tame", totals[what], what)
		}
	}
}

// quiet reports that nothing is owed and nothing is remembered.
func (s *simulation) quiet() bool {
	for lane, rows := range s.table {
		if len(rows) > 0 || len(s.parking.parked[lane]) > 0 {
			return false
		}
	}
	for _, l := range s.parking.letters {
		if l.state == "replaying" || l.state == "discarding" {
			return false
		}
	}
	for _, w := range s.workers {
		if w.removal != nil || len(w.removals.confirmed) > 0 || w.publishing.inFlight > 0 || len(w.tasks.retried) > 0 || w.task != nil {
			return false
		}
	}
	return len(s.open) == 0
}

func (s *simulation) problems() []string {
	var problems []string
	if !s.quiet() {
		problems = append(problems, "does not come to rest")
	}
	last := map[string]int64{}
	first := map[int64]bool{}
	for _, r := range s.wire {
		if first[r.ID] {
			continue
		}
		first[r.ID] = true
		if r.replayed && s.retry.Exhausted == ExhaustedSkip {
			continue // its place was given up
		}
		if r.Key != "" && r.ID < last[r.Key] && s.order == OrderPerKey {
			problems = append(problems, fmt.Sprintf("reordered: %d of key %s after %d", r.ID, r.Key, last[r.Key]))
		}
		last[r.Key] = r.ID
	}
	for _, id := range slices.Sorted(maps.Keys(s.rows)) {
		r := s.rows[id]
		letter := slices.ContainsFunc(s.parking.letters, func(l *simDeadLetter) bool { return l.row == r && l.state == "dead" })
		switch {
		case r.copies == 0 && !letter && !r.discarded:
			problems = append(problems, fmt.Sprintf("lost: %d", r.ID))
		case r.copies > 0 && letter && !r.replayed && r.excused == 0:
			problems = append(problems, fmt.Sprintf("dead and delivered: %d", r.ID))
		}
		if r.copies > 1+r.excused {
			problems = append(problems, fmt.Sprintf("repeated without a fault: %d, %d copies, %d excused", r.ID, r.copies, r.excused))
		}
	}
	for _, never := range []string{"deleted before it was sent", silentLetters, "charged without a reason", "isolated lanes beside one another", "in flight without a record", "wrong term", "circuits open although a message has passed", "sent without its payload", "sent while paused"} {
		if n := s.stats[never]; n > 0 {
			problems = append(problems, fmt.Sprintf("%s: %d", never, n))
		}
	}
	for _, w := range s.workers {
		for _, l := range w.lanes {
			if l == nil {
				continue
			}
			if len(l.entries) != 0 || len(l.chains) != 0 || l.bytes != 0 || l.inFlight != 0 || len(l.failing) != 0 || len(l.followers) != 0 {
				problems = append(problems, fmt.Sprintf("lane %d remembers %d entries, %d keys, %d bytes, %d in flight, %d failing, %d followers",
					l.number, len(l.entries), len(l.chains), l.bytes, l.inFlight, len(l.failing), len(l.followers)))
			}
		}
	}
	return problems
}
