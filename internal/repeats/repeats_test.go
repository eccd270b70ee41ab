package repeats_test

import (
	"fmt"
	"log/slog"
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
			if level, _ := s.Failed(slog.LevelWarn); level == slog.LevelWarn {
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
			if level, _ := s.Failed(slog.LevelWarn); level == slog.LevelWarn {
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
			level, attrs := s.Failed(slog.LevelError)
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
			if level, _ := s.Failed(slog.LevelWarn); level == slog.LevelWarn {
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
			if level, attrs := s.Event(slog.LevelWarn); level != slog.LevelWarn || len(attrs) != 0 {
				t.Errorf("an event: %v, %v", level, attrs)
			}
			if level, _ := s.Event(slog.LevelWarn); level != slog.LevelDebug {
				t.Errorf("the next: %v", level)
			}
			time.Sleep(30 * time.Second)
			if level, attrs := s.Event(slog.LevelWarn); level != slog.LevelWarn || fmt.Sprint(attrs) != "[failures 3 lasted 30s]" {
				t.Errorf("a later one: %v, %v", level, attrs)
			}
			time.Sleep(2 * time.Minute)
		}
	})
}
