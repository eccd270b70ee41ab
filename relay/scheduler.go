package relay

import (
	"context"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

const (
	// Commits of this process wake the scheduler: they may have scheduled something for
	// now. Most have not, so its rate is limited.
	schedulerRest = 25 * time.Millisecond

	// schedulerUnfit is the pause while the tables are not as they should be.
	schedulerUnfit = time.Second
)

// scheduler moves due scheduled messages into the outbox while this worker has the
// lease of the upkeep. Each of its transactions locks that lease, so two workers never
// do it at once, which would lose the order of keys.
func (w *worker) scheduler(ctx context.Context) error {
	wake, unlisten := w.queue.Listen()
	defer unlisten()
	retry := newBackOff()
	limit := time.Duration(0) // of the next call; 0: as usual
	last := time.Duration(0)  // what the last look took; 0: it failed
	for {
		epoch, ok := w.upkeepLease.await(ctx)
		if !ok {
			return nil
		}
		// A commit may end the wait once the rest is over.
		rest, wait := schedulerRest, schedulerUnfit
		begin := time.Now()
		if !w.unfit.Load() {
			moved, err := w.moveDue(ctx, epoch, limit)
			limit = moved.Limit // a call without an answer names none
			// A slow look passes over entries that an old snapshot keeps from being
			// removed. It must not become the database's main load. One slow look alone
			// may have waited for a lock.
			took := time.Since(begin)
			slow := 10 * min(took, last)
			last = took
			if err == nil {
				if attrs, report := w.failing.moves.Over(); report {
					w.log.InfoContext(ctx, "scheduled messages are moved again", attrs...)
				}
			}
			begin = time.Now()
			switch {
			case err == nil && (moved.Rows > 0 || moved.Failed):
				retry.Reset()
				continue // there may be more
			case err == nil:
				retry.Reset()
				rest, wait = max(rest, slow), max(moved.Next, slow)
			case ctx.Err() == nil:
				last = 0
				rest = retry.NextBackOff()
				wait = rest
				if !sqlerr.Retryable(err) && !bounded.Silence(err) {
					level, attrs := w.failed(&w.failing.moves, slog.LevelWarn, err)
					w.log.Log(ctx, level, "moving scheduled messages failed; trying again", append(attrs, "error", err)...)
				}
			}
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-wake:
			sleep.For(ctx, min(rest, wait)-time.Since(begin))
		}
		timer.Stop()
	}
}

func (w *worker) moveDue(ctx context.Context, epoch int64, limit time.Duration) (outboxstore.Moved, error) {
	move := func(ctx context.Context) (outboxstore.Moved, error) {
		return w.queue.MoveDue(ctx, w.upkeepGuard(epoch))
	}
	var moved outboxstore.Moved
	var err error
	if limit > 0 {
		moved, err = askLong(ctx, w, limit, move)
	} else {
		moved, err = ask(ctx, w, opMove, move)
	}
	w.upkeepCalled(ctx, opMove, epoch, err)
	if moved.Rows > 0 {
		w.met.moved.Add(ctx, int64(moved.Rows))
	}
	return moved, err
}
