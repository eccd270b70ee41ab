package inbox

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestInbox_SummarizesEachMinuteInWhichSomethingHappened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		in := &Inbox{cfg: Config{Consumer: "stock", Logger: slog.New(slog.NewTextHandler(&log, nil))}, telemetry: &telemetry{}}
		ctx, cancel := context.WithCancel(t.Context())
		go in.summarize(ctx)
		lines := func(after time.Duration) (all []string) {
			time.Sleep(after)
			synctest.Wait()
			for line := range strings.Lines(log.String()) {
				all = append(all, line)
			}
			log.Reset()
			return all
		}
		if got := lines(time.Hour); len(got) != 0 {
			t.Errorf("nothing happened: %q", got)
		}
		for _, result := range []outcome{outcomeHandled, outcomeHandled, outcomeDuplicate, outcomeHandlerFailed, outcomeDeadLetter, outcomeWaiting} {
			in.telemetry.happened.add(result)
		}
		if got := lines(2 * time.Minute); len(got) != 1 || !strings.Contains(got[0], `level=INFO msg="messages handled" consumer=stock handled=2 duplicates=1 failed=1 dead_lettered=1`) {
			t.Errorf("one minute: %q", got)
		}
		// For an hour, every attempt fails.
		go func() {
			for range 3600 {
				in.telemetry.happened.add(outcomeHandlerFailed)
				time.Sleep(time.Second)
			}
		}()
		if got := lines(time.Hour); len(got) < 5 || len(got) > 12 {
			t.Errorf("%d lines in an hour in which all failed: %q", len(got), got)
		}
		cancel()
	})
}
