package idempotency

import (
	"flag"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
)

var (
	schedules = flag.Int("schedules", testserver.Rounds(400, 2000), "random schedules that TestEngine_KeepsItsPromisesUnderAnySchedule runs")
	firstSeed = flag.Uint64("seed", 0, "seed of the first schedule")
)

// quiet reports that everything has ended.
func (s *simulation) quiet() bool {
	waiting, _ := s.data.server.Waiting()
	return waiting == 0 && s.data.server.Open() == 0 && !slices.ContainsFunc(s.keys, func(c *simClient) bool { return !s.done(c) })
}

// done reports whether a client has its answer, or has asked in vain often enough: for what
// never succeeds.
func (s *simulation) done(c *simClient) bool {
	return c.open == 0 && (c.over || c.always != deedSucceeds && c.failed > 10)
}

// problems returns which promises the schedule has broken.
func (s *simulation) problems() (problems []string) {
	bad := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if !s.quiet() {
		waiting, locked := s.data.server.Waiting()
		bad("does not come to rest: %d calls, %d of them for a lock, %d transactions", waiting, locked, s.data.server.Open())
	}
	for _, text := range s.data.server.Unknown() {
		bad("a statement that the model does not know: %s", text)
	}
	for _, c := range s.keys {
		if !s.quiet() {
			bad("%s: %d requests open, %d failed", c.key, c.open, c.failed)
		}
		var effects []int64
		for _, e := range s.data.effects {
			if e.key == c.key {
				effects = append(effects, e.run)
			}
		}
		if !s.transactional {
			effects = s.elsewhere[c.key]
		}
		answers := slices.Compact(slices.Sorted(slices.Values(c.answers)))
		// Where the outcome of a run may be unknown and it may run again, an answer that could not
		// be stored is sent all the same, and the next run has another.
		again := !s.transactional && s.cfg.Failures.Crashed != CrashedUnknown
		if len(answers) > 1 && !again {
			bad("%s: different answers: %q", c.key, answers)
		}
		if len(effects) > 1 && !again {
			bad("%s: %d effects", c.key, len(effects))
		}
		for _, answer := range answers {
			refused := strings.HasPrefix(answer, "refusal") && (len(effects) == 0 || again)
			if !refused && !slices.ContainsFunc(effects, func(run int64) bool { return answer == fmt.Sprint("answer ", run) }) {
				bad("%s: answered %q, effects of the runs %v", c.key, answer, effects)
			}
		}
	}
	return problems
}

// simulate runs the schedule of a seed to its end.
func (w *simWorld) simulate(seed uint64) *simulation {
	s := w.newSimulation(seed)
	for range 40 + s.rng.IntN(120) {
		s.step()
	}
	s.faults = false
	s.data.server.Restart()
	for i := 0; i < 5_000 && !s.quiet(); i++ {
		s.step()
	}
	for _, p := range s.processes {
		p.stop()
	}
	// One that does not come to rest leaves nothing behind either.
	for waiting := 1; waiting > 0 || s.served() > 0; waiting, _ = s.data.server.Waiting() {
		s.data.server.Next(s.rng, false)
		time.Sleep(time.Second)
		synctest.Wait()
	}
	return s
}

// served returns how many requests have no answer.
func (s *simulation) served() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

// A seed that fails is of use only if it fails again.
func TestEngine_ASeedRepeatsItsSchedule(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimWorld()
		defer w.db.Close()
		for seed := range testserver.Rounds[uint64](10, 30) {
			a := w.simulate(seed)
			effects, counts, next := slices.Clone(w.data.effects), w.data.server.Counts(), a.rng.Uint64()
			b := w.simulate(seed)
			if next != b.rng.Uint64() || !slices.Equal(effects, w.data.effects) || !maps.Equal(counts, w.data.server.Counts()) || !maps.Equal(a.stats, b.stats) {
				t.Errorf("seed %d: two schedules, %v %v and %v %v", seed, a.stats, counts, b.stats, w.data.server.Counts())
			}
		}
	})
}

func TestEngine_KeepsItsPromisesUnderAnySchedule(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	totals := map[string]int{}
	workers := runtime.GOMAXPROCS(0)
	t.Run("in bubbles", func(t *testing.T) {
		for worker := range workers {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := newSimWorld()
					defer w.db.Close()
					for n := worker; n < *schedules && !t.Failed(); n += workers {
						seed := *firstSeed + uint64(n) //nolint:gosec // small
						s := w.simulate(seed)
						for _, problem := range s.problems() {
							t.Errorf("seed %d: %s", seed, problem)
						}
						mu.Lock()
						s.count(totals)
						mu.Unlock()
					}
				})
			})
		}
	})
	t.Logf("%d schedules: %v", *schedules, totals)
	for _, what := range []string{
		"crashes", "killed", "effects", "answers 201", "answers 404", "answers 409", "answers 500", "answers 503", "answers lost", "unknown outcomes",
		"waits", "deadlocks", "lock timeouts", "lost calls", "lost answers", "commits without an answer", "serialization failures", "noticed", "outages",
	} {
		if totals[what] < max(1, *schedules/100) {
			t.Errorf("only %d %s: the schedules are too tame", totals[what], what)
		}
	}
}

// count adds what has happened in a schedule.
func (s *simulation) count(totals map[string]int) {
	for _, counts := range []map[string]int{s.stats, s.data.server.Counts()} {
		for what, n := range counts {
			totals[what] += n
		}
	}
	totals["effects"] += len(s.data.effects)
	for _, runs := range s.elsewhere {
		totals["effects elsewhere"] += len(runs)
	}
}
