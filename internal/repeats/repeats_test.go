package repeats_test

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/repeats"
)

func TestSeries_ReportsAnHourOfFailuresInADozenLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		var at []time.Duration
		begin := time.Now()
		for range 36_000 {
			if level, _ := s.Failed(slog.LevelWarn, "away"); level == slog.LevelWarn {
				at = append(at, time.Since(begin))
			}
			time.Sleep(100 * time.Millisecond)
		}
		if len(at) < 5 || len(at) > 12 || at[0] != 0 || at[1] != 10*time.Second {
			t.Errorf("lines at %v", at)
		}
		attrs, report := s.Over()
		if want := "[failures 36000 lasted 1h0m0s]"; !report || fmt.Sprint(attrs) != want {
			t.Errorf("the end: %v, %v", report, attrs)
		}
		if _, report := s.Over(); report {
			t.Error("the end was reported twice")
		}
	})
}

func TestSeries_ReportsWhatWorksNowAndThenNoMoreOften(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		lines := 0
		for range 36_000 {
			if level, _ := s.Failed(slog.LevelWarn, "away"); level == slog.LevelWarn {
				lines++
			}
			if _, report := s.Over(); report {
				lines++
			}
			time.Sleep(100 * time.Millisecond)
		}
		if lines < 5 || lines > 24 {
			t.Errorf("%d lines", lines)
		}
	})
}

func TestSeries_ReportsAFailureAfterACalmAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		for range 5 {
			level, attrs := s.Failed(slog.LevelError, "away")
			if level != slog.LevelError || len(attrs) != 0 {
				t.Errorf("a failure: %v, %v", level, attrs)
			}
			if _, report := s.Over(); !report {
				t.Error("its end was not reported")
			}
			time.Sleep(2 * time.Minute)
		}
	})
}

func TestSeries_ReportsOnceHoweverManyFailAtOnce(t *testing.T) {
	t.Parallel()
	var s repeats.Series
	var group sync.WaitGroup
	var mu sync.Mutex
	lines := 0
	for range 100 {
		group.Go(func() {
			if level, _ := s.Failed(slog.LevelWarn, "away"); level == slog.LevelWarn {
				mu.Lock()
				lines++
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if lines != 1 {
		t.Errorf("%d lines", lines)
	}
}

func TestSeries_EndsAfterAMinuteWithoutAnEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		for range 3 {
			if level, attrs := s.Event(slog.LevelWarn, "away"); level != slog.LevelWarn || len(attrs) != 0 {
				t.Errorf("an event: %v, %v", level, attrs)
			}
			if level, _ := s.Event(slog.LevelWarn, "away"); level != slog.LevelDebug {
				t.Errorf("the next: %v", level)
			}
			time.Sleep(30 * time.Second)
			if level, attrs := s.Event(slog.LevelWarn, "away"); level != slog.LevelWarn || fmt.Sprint(attrs) != "[failures 3 lasted 30s]" {
				t.Errorf("a later one: %v, %v", level, attrs)
			}
			time.Sleep(2 * time.Minute)
		}
	})
}

func TestSeries_ReportsAnotherKindOfFailureAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		fail := func(kind string) slog.Level {
			time.Sleep(time.Millisecond)
			level, _ := s.Failed(slog.LevelWarn, kind)
			return level
		}
		for i, c := range []struct {
			kind string
			want slog.Level
		}{
			{"read 127.0.0.1:5000: reset", slog.LevelWarn},
			{"read 127.0.0.1:6000: reset", slog.LevelDebug},
			{"permission denied", slog.LevelWarn},
			{"permission denied", slog.LevelDebug},
			{"read 127.0.0.1:7000: reset", slog.LevelDebug},
		} {
			if got := fail(c.kind); got != c.want {
				t.Errorf("failure %d, %q: %v", i, c.kind, got)
			}
		}
		// A text that is another each time is not a kind each time.
		lines := 0
		for i := range 100_000 {
			if fail(strings.Repeat("x", i%2000)) == slog.LevelWarn {
				lines++
			}
		}
		if lines < 6 || lines > 12 {
			t.Errorf("%d lines", lines)
		}
		s.Over()
		if fail("permission denied") != slog.LevelDebug {
			t.Error("what failed, worked and fails again is news")
		}
		s.Over()
		time.Sleep(2 * time.Minute)
		if fail("permission denied") != slog.LevelWarn || fail("reset") != slog.LevelWarn {
			t.Error("what fails after a calm is no news")
		}
	})
}

// Failures that another series stands for are at debug. When that is over, and they are not,
// they are reported at once.
func TestSeries_ReportsAtOnceWhatWasAtDebugForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		for range 3600 {
			if level, attrs := s.Failed(slog.LevelDebug, "away"); level != slog.LevelDebug || attrs != nil {
				t.Fatalf("at debug: %v, %v", level, attrs)
			}
			time.Sleep(time.Second)
		}
		if level, attrs := s.Failed(slog.LevelWarn, "away"); level != slog.LevelWarn || fmt.Sprint(attrs) != "[failures 3601 lasted 1h0m0s]" {
			t.Errorf("afterwards: %v, %v", level, attrs)
		}
	})
}

func TestSeries_IsCalmAMinuteAfterItsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s repeats.Series
		calm := func(want bool) {
			t.Helper()
			if s.Calm() != want {
				t.Errorf("calm: %v", !want)
			}
		}
		calm(true)
		s.Failed(slog.LevelWarn, "away")
		time.Sleep(time.Hour)
		calm(false)
		s.Failed(slog.LevelWarn, "away")
		s.Over()
		calm(false)
		time.Sleep(2 * time.Minute)
		calm(true)
	})
}
