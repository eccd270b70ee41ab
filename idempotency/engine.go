package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/repeats"
)

// The way of a request: http.go reads it, decide.go claims its key or finds out why not,
// run.go runs its handler (transaction.go, group.go), settle.go updates the claim, and
// respond.go answers. do.go does the same for a command. Files depend in this direction
// only; below them are core.go and the stores.

// Engine runs requests and commands once for each key. Its methods are middleware; see
// [Engine.TxMiddleware] and [Engine.Middleware]. It owns no connection and no goroutine,
// and is safe for concurrent use.
type Engine struct {
	*core
	runner runner
}

// New returns an engine on a store. It does no I/O. All bad values of cfg are reported at
// once, each as an [*oncemill.ConfigError].
func New(store Store, cfg Config) (*Engine, error) {
	if store == nil {
		return nil, &oncemill.ConfigError{Field: "idempotency.New store", Value: "nil", Problem: "a store is needed"}
	}
	cfg, err := cfg.resolve()
	codec, codecErr := newCodec(cfg.Responses.CompressAbove, cfg.Responses.Encryption)
	guard := nopanic.NewTelemetry(cfg.Logger)
	telemetry, telemetryErr := newTelemetry(cfg.Telemetry.MeterProvider, guard)
	if telemetryErr != nil {
		telemetryErr = fmt.Errorf("idempotency: make metrics: %w", telemetryErr)
	}
	var quotaErr error
	if _, counts := store.(QuotaStore); cfg.Keys.Quota.limited() && !counts {
		quotaErr = badValue("Keys.Quota", fmt.Sprintf("%T", store), "needs a store that implements QuotaStore")
	}
	var archiveErr error
	if _, deletes := store.(*SQLStore); cfg.Expiry.archives() && !deletes {
		archiveErr = badValue("Expiry.Archive", fmt.Sprintf("%T", store), "needs a SQLStore")
	}
	if err := errors.Join(err, codecErr, telemetryErr, quotaErr, archiveErr); err != nil {
		return nil, err
	}
	e := &Engine{core: &core{
		store: store, claimKey: store.Claim, cfg: cfg, codec: codec, hash: newHasher(cfg.Keys.Secret), telemetry: telemetry,
		tracer: guard.Tracer(cfg.Telemetry.TracerProvider, "github.com/oncemill/oncemill/idempotency"),
		draw:   rand.N[time.Duration], at: crashpoint.Reach,
	}}
	if shared, ok := store.(*SQLStore); ok && cfg.Transactions.GroupSize > 1 {
		limits := groupLimits(cfg.Transactions.GroupSize, shared)
		e.claimKey = newClaims(shared, limits, cfg.Logger).claim
		e.runner.groups = newGroups(e.core, shared, limits)
	}
	if shared, ok := store.(*SQLStore); ok && cfg.Expiry.archives() {
		e.claimKey = shared.keepingDue(e.claimKey)
	}
	return e, nil
}

// Purge deletes records that are past retention, in batches, until there are none left. It
// returns how many it deleted.
func (e *Engine) Purge(ctx context.Context) (int, error) {
	total := 0
	for {
		n, err := e.purgeBatch(ctx)
		total += n
		if err != nil {
			return total, err
		}
		if n == 0 {
			return total, e.purgeUsage(ctx)
		}
	}
}

func (e *Engine) deleteBatch(ctx context.Context) (int, error) {
	store, ok := e.store.(*SQLStore)
	switch {
	case !ok || !e.cfg.Expiry.archives():
		return e.store.Purge(ctx, e.cfg.Expiry.PurgeBatch)
	case e.cfg.Expiry.Archive == nil:
		return 0, nil
	}
	return store.purgeArchived(ctx, e.cfg.Expiry.PurgeBatch, e.cfg.Expiry.Archive, e.reveal)
}

// purgeUsage deletes the counts of windows that have ended.
func (e *Engine) purgeUsage(ctx context.Context) error {
	store, ok := e.store.(*SQLStore)
	if !ok || !e.cfg.Keys.Quota.limited() {
		return nil
	}
	for {
		if n, err := store.PurgeUsage(ctx, e.cfg.Expiry.PurgeBatch); err != nil || n == 0 {
			return err
		}
	}
}

func (e *Engine) purgeBatch(ctx context.Context) (int, error) {
	began := time.Now()
	n, err := e.deleteBatch(ctx)
	e.telemetry.latency(ctx, "purge", began, err)
	return n, err
}

// Migrations returns the migrations of the tables that the engine uses on a [SQLStore].
func (e *Engine) Migrations() []oncemill.Migrations {
	if e.cfg.Keys.Quota.limited() {
		return []oncemill.Migrations{Migrations, QuotaMigrations}
	}
	return []oncemill.Migrations{Migrations}
}

// Run purges every PurgeEvery until ctx ends, and then returns nil. One process per
// service is enough; more do no harm. An error of the store is logged, and the purge is
// retried. If the tables of a [SQLStore] have not been created, it returns at once with an
// [*oncemill.SchemaError].
func (e *Engine) Run(ctx context.Context) error {
	if store, ok := e.store.(*SQLStore); ok {
		var schema *oncemill.SchemaError
		_, err := within(ctx, store, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, oncemill.CheckMigrated(ctx, store.db, store.where.Config(), e.Migrations()...)
		})
		if errors.As(err, &schema) && schema.Have < schema.Want {
			return fmt.Errorf("idempotency: %w", err)
		}
	}
	var purges repeats.Series
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		switch n, err := e.Purge(ctx); {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			level, attrs := purges.Failed(slog.LevelWarn, err.Error())
			e.cfg.Logger.Log(ctx, level, "purge failed", append(attrs, "error", err)...)
		default:
			if attrs, report := purges.Over(); report {
				e.cfg.Logger.InfoContext(ctx, "purge works again", append(attrs, "count", n)...)
			} else if n > 0 {
				e.cfg.Logger.DebugContext(ctx, "keys purged", "count", n)
			}
		}
		timer.Reset(e.cfg.Expiry.PurgeEvery)
	}
}
