package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Migrations creates the tables inbox, with its seal, inbox_failures, inbox_sequences and
// inbox_refused.
var Migrations = oncemill.Migrations{Name: "inbox", FS: inboxstore.Migrations}

const (
	purgeBatch    = 1000
	purgeInterval = 10 * time.Second

	// purgePause is between two batches. Purging yields to handling: it removes at most some
	// 10,000 ids a second.
	purgePause = purgeInterval / 100

	// purgeWorthwhile is how many failure records must have been removed for the next ones
	// to be looked at at once.
	purgeWorthwhile = purgeBatch / 10
)

// Run removes ids that are older than Config.Retention, a thousand at a time, performs
// replays (Config.Replays), and logs once a minute what was handled, until ctx ends; then it returns nil. Ids of dead letters stay.
// One process per consumer is enough; more do no harm. Failures are logged and retried. If
// the tables have not been created, it returns at once with an [*oncemill.SchemaError].
func (in *Inbox) Run(ctx context.Context) error {
	var schema *oncemill.SchemaError
	_, err := ask(ctx, in, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, oncemill.CheckMigrated(ctx, in.db, in.cfg.Database, Migrations)
	})
	if errors.As(err, &schema) && schema.Have < schema.Want {
		return fmt.Errorf("inbox: %w", err)
	}
	var loops sync.WaitGroup
	loops.Go(func() { in.purgeLoop(ctx) })
	loops.Go(func() { in.summarize(ctx) })
	if in.replayer != nil {
		loops.Go(func() { in.replayer.loop(ctx) })
	}
	loops.Wait()
	return nil
}

func (in *Inbox) purgeLoop(ctx context.Context) {
	for {
		more, err := in.Purge(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			level, attrs := in.failing.purges.Failed(slog.LevelWarn, err.Error())
			in.cfg.Logger.Log(ctx, level, "old ids not removed", append(attrs, "consumer", in.cfg.Consumer, "error", err)...)
		default:
			if attrs, report := in.failing.purges.Over(); report {
				in.cfg.Logger.InfoContext(ctx, "old ids are removed again", append(attrs, "consumer", in.cfg.Consumer)...)
			}
		}
		wait := purgeInterval
		if more {
			wait = purgePause
		}
		if !sleep.For(ctx, in.jitter(wait)) {
			return
		}
	}
}

// Purge is one step of Run. It reports whether there may be more to remove. If it fails for a
// handler of [Inbox.PerHandler], it goes on with the next, unless the server does not answer at all.
func (in *Inbox) Purge(ctx context.Context) (more bool, err error) {
	var errs []error
	for _, own := range in.family() {
		removed, err := removeBatch(ctx, own.calls, own.store, own.cfg.Retention, own.archive())
		more = more || removed.full()
		if err != nil {
			errs = append(errs, err)
		}
		if ctx.Err() != nil || errors.Is(err, bounded.ErrAbandoned) { // so would the others
			break
		}
	}
	return more && len(errs) == 0, errors.Join(errs...)
}

// removal is what one batch has removed of a consumer.
type removal struct {
	ids, failures int64
	found         int64 // old ids; others may have locked or removed some
}

// full reports whether there may be more to remove.
func (r removal) full() bool {
	return r.ids > 0 && r.found == purgeBatch || r.failures >= purgeWorthwhile
}

// removeBatch removes one batch of what a consumer keeps past its retention. archive may be
// nil.
func removeBatch(ctx context.Context, calls *bounded.Calls, store inboxstore.Store, retention time.Duration, archive archive) (removal, error) {
	if archive != nil {
		return archiveBatch(ctx, calls, store, retention, archive)
	}
	return bounded.Do(ctx, calls, callLimit, func(ctx context.Context) (removal, error) {
		ids, failures, err := store.Purge(ctx, retention, purgeBatch)
		return removal{ids: ids, failures: failures, found: ids}, err
	})
}
