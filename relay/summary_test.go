package relay

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestWorker_SummarizesEachMinuteInWhichSomethingHappened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		w := &worker{log: slog.New(slog.NewTextHandler(&log, nil))}
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = w.summarize(ctx) }()
		lines := func(after time.Duration) []string {
			time.Sleep(after)
			synctest.Wait()
			text := strings.TrimSpace(log.String())
			log.Reset()
			if text == "" {
				return nil
			}
			return strings.Split(text, "\n")
		}
		if got := lines(time.Hour); len(got) != 0 {
			t.Errorf("nothing happened: %q", got)
		}
		w.happened.delivered.Add(12)
		w.happened.dead.Add(1)
		if got := lines(2 * time.Minute); len(got) != 1 || !strings.Contains(got[0], `level=INFO msg="messages relayed" delivered=12 refused=0 dead_lettered=1 failed=0`) {
			t.Errorf("one minute: %q", got)
		}
		// For an hour, publishing fails all the time.
		go func() {
			for range 3600 {
				w.happened.failed.Add(10)
				time.Sleep(time.Second)
			}
		}()
		if got := lines(time.Hour); len(got) < 5 || len(got) > 12 {
			t.Errorf("%d lines in an hour without a delivery: %q", len(got), got)
		}
		cancel()
	})
}
