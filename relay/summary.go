package relay

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/outbox"
)

const summaryEvery = time.Minute

// happened counts what a worker has done since its last summary.
type happened struct{ delivered, retries, dead, failed atomic.Int64 }

// ownerDigits is how much of an owner the log has.
const ownerDigits = 6

// name names a worker in the log. Several workers may have the same name; the beginning of
// the owner tells them apart.
func (w *worker) name() string {
	if w.cfg.UniqueName {
		return w.cfg.Name
	}
	return strings.TrimPrefix(w.cfg.Name+"/"+w.owner[:min(ownerDigits, len(w.owner))], "/")
}

// summarize logs once a minute what has happened, if anything has. While publishing only
// fails, the line comes at growing intervals.
func (w *worker) summarize(ctx context.Context) error {
	calls := bounded.New(1)
	var stuck repeats.Series
	for sleep.For(ctx, summaryEvery) {
		delivered, attrs := w.happened.take()
		if attrs == nil {
			continue
		}
		level := slog.LevelInfo
		if delivered {
			stuck.Over()
		} else {
			var more []any
			level, more = stuck.Failed(slog.LevelInfo, "")
			attrs = append(attrs, more...)
		}
		if !w.log.Enabled(ctx, level) {
			continue
		}
		w.log.Log(ctx, level, "messages relayed", append(attrs, w.backlog(ctx, calls)...)...)
	}
	return nil
}

// take returns what has happened since the last call, nil if nothing has.
func (h *happened) take() (delivered bool, attrs []any) {
	n, retries, dead, failed := h.delivered.Swap(0), h.retries.Swap(0), h.dead.Swap(0), h.failed.Swap(0)
	if n+retries+dead+failed == 0 {
		return false, nil
	}
	return n > 0, []any{"delivered", n, "refused", retries, "dead_lettered", dead, "failed", failed}
}

// summarizeRest logs what has happened since the last summary, when everything else has ended. A
// deployment every few minutes would otherwise leave gaps in the sums.
func (w *worker) summarizeRest(ctx context.Context) {
	if _, attrs := w.happened.take(); attrs != nil {
		w.log.InfoContext(ctx, "messages relayed", attrs...)
	}
}

// backlog returns how much waits, and how old the oldest is. One worker, that with the lease
// of the upkeep, reads it.
func (w *worker) backlog(ctx context.Context, calls *bounded.Calls) []any {
	if w.upkeepLease.held() == 0 {
		return nil
	}
	read, err := bounded.Do(ctx, calls, gaugesLimit, func(ctx context.Context) (outboxstore.Backlog, error) {
		return w.queue.Backlog(ctx, gaugesMost/outbox.Lanes)
	})
	if err != nil {
		return []any{"backlog_error", err}
	}
	n, _ := read.Depth()
	return []any{"backlog", n, "oldest", read.Oldest().Round(time.Millisecond)}
}
