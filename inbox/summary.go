package inbox

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sleep"
)

// failing holds what fails again and again in an outage, so that an outage is a dozen lines.
type failing struct {
	outage, purges, replays, records repeats.Series

	letters repeats.Series // dead letters
	stuck   repeats.Series // minutes in which nothing was handled
}

const summaryEvery = time.Minute

// happened counts what an inbox has done since its last summary.
type happened struct{ handled, duplicates, failed, dead atomic.Int64 }

func (h *happened) add(result outcome) {
	switch result {
	case outcomeHandled:
		h.handled.Add(1)
	case outcomeDuplicate:
		h.duplicates.Add(1)
	case outcomeDeadLetter:
		h.dead.Add(1)
	case outcomeIgnored, outcomeWaiting:
	default:
		h.failed.Add(1)
	}
}

// summarize logs once a minute what has happened, if anything has. While all attempts fail,
// the line comes at growing intervals.
func (in *Inbox) summarize(ctx context.Context) {
	for sleep.For(ctx, summaryEvery) {
		for _, own := range in.family() {
			h := &own.telemetry.happened
			handled, duplicates, failed, dead := h.handled.Swap(0), h.duplicates.Swap(0), h.failed.Swap(0), h.dead.Swap(0)
			if handled+duplicates+failed+dead == 0 {
				continue
			}
			level, attrs := slog.LevelInfo, []any{"consumer", own.cfg.Consumer, "handled", handled, "duplicates", duplicates, "failed", failed, "dead_lettered", dead}
			if handled+duplicates > 0 {
				own.failing.stuck.Over()
			} else {
				var more []any
				level, more = own.failing.stuck.Failed(slog.LevelInfo, "")
				attrs = append(attrs, more...)
			}
			own.cfg.Logger.Log(ctx, level, "messages handled", attrs...)
		}
	}
}
