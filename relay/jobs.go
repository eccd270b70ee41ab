package relay

import (
	"context"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

const (
	jobsBusy  = 50 * time.Millisecond // between looks while a job is in progress
	jobsRest  = time.Second
	jobsAfter = 5 * time.Second // after the last step
	jobsLimit = 20 * time.Second
)

// jobs runs the replay jobs of dead letters while this worker has the lease of the upkeep, so
// that one worker looks for them. It needs no fence: each step locks its job. It decides which
// dead letters are replayed and when; the loop carries the replays out.
func (w *worker) jobs(ctx context.Context) error {
	var last time.Time
	for {
		if _, ok := w.upkeepLease.await(ctx); !ok {
			return nil
		}
		worked, err := bounded.Do(ctx, w.bounds, jobsLimit, w.deadLetters.RunJobs)
		rest := jobsRest
		switch {
		case worked:
			last, rest = time.Now(), 0
		case err == nil && time.Since(last) < jobsAfter:
			rest = jobsBusy
		}
		if err != nil && ctx.Err() == nil && !sqlerr.Retryable(err) {
			level, attrs := w.failed(&w.failing.jobs, slog.LevelWarn, err)
			w.log.Log(ctx, level, "running replay jobs failed; trying again", append(attrs, "error", err)...)
		} else if err == nil {
			if attrs, report := w.failing.jobs.Over(); report {
				w.log.InfoContext(ctx, "replay jobs run again", attrs...)
			}
		}
		sleep.For(ctx, rest)
	}
}
