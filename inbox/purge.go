package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Migrations creates the tables inbox, with its seal, inbox_failures, inbox_sequences and
// inbox_refused.
var Migrations = oncemill.Migrations{Name: "inbox", FS: inboxstore.Migrations}

const (
	purgeBatch    = 1000
	purgeInterval = 10 * time.Second

	// purgeWorthwhile is how many failure records must have been removed for the next ones
	// to be looked at at once.
	purgeWorthwhile = purgeBatch / 10
)

// Run removes ids that are older than Config.Retention, a thousand at a time, and performs
// replays (Config.Replays), until ctx ends; then it returns nil. Ids of dead letters stay.
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
	if in.replayer != nil {
		loops.Go(func() { in.replayer.loop(ctx) })
	}
	loops.Wait()
	return nil
}

func (in *Inbox) purgeLoop(ctx context.Context) {
	for {
		more, err := in.Purge(ctx)
		if err != nil && ctx.Err() == nil {
			in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "old ids not removed", slog.String("consumer", in.cfg.Consumer), slog.Any("error", err))
		}
		// Purging yields to handling: it removes at most some 10,000 ids a second.
		wait := purgeInterval
		if more {
			wait = purgeInterval / 100
		}
		if !sleep.For(ctx, in.jitter(wait)) {
			return
		}
	}
}

// Purge is one step of Run. It reports whether there may be more to remove.
func (in *Inbox) Purge(ctx context.Context) (more bool, err error) {
	for _, own := range in.family() {
		full, err := ask(ctx, own, func(ctx context.Context) (bool, error) {
			ids, failures, err := own.store.Purge(ctx, own.cfg.Retention, purgeBatch)
			return ids == purgeBatch || failures >= purgeWorthwhile, err
		})
		if err != nil {
			return false, err
		}
		more = more || full
	}
	return more, nil
}
