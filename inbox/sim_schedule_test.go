package inbox

import (
	"flag"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/oncemill/oncemill/internal/testserver"
)

var (
	schedules = flag.Int("schedules", testserver.Rounds(400, 2000), "random schedules that TestInbox_KeepsItsPromisesUnderAnySchedule runs")
	firstSeed = flag.Uint64("seed", 0, "seed of the first schedule")
)

// A seed that fails is of use only if it fails again.
func TestInbox_ASeedRepeatsItsSchedule(t *testing.T) {
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

func TestInbox_KeepsItsPromisesUnderAnySchedule(t *testing.T) {
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
		"crashes", "killed", "duplicates", "replays", "long pauses", "effects", "shared transactions", "letters failed", "letters permanent", "letters crashed", "letters older-than-retention",
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
	totals["shared transactions"] += s.data.shared
	for _, l := range s.letters() {
		totals["letters "+l.reason]++
	}
}
