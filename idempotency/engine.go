package idempotency

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/oncemill/oncemill"
)

// Engine runs requests and commands once for each key. Its methods are middleware; see
// [Engine.TxMiddleware] and [Engine.Middleware]. It owns no connection and no goroutine,
// and is safe for concurrent use.
type Engine struct {
	store     Store
	cfg       Config
	codec     codec
	hash      hasher
	telemetry *telemetry
	limits    limits
	groups    *groups // nil: each transaction is of one request

	// at is called at named points of a request, for tests that crash there.
	at func(point string)
}

// Scope identifies the caller and operation that a key belongs to. The same key in another
// scope is another key.
type Scope struct {
	Tenant    string
	Principal string // user, or client of the API

	// Route is the operation. Default: the pattern that http.ServeMux matched. If there is
	// none, because the middleware is outside the mux: the path. The method is always part
	// of the scope.
	Route string
}

// SingleTenant is a Config.Scope for services that have only one caller. With several
// callers, one could replay another's answer by guessing its key.
func SingleTenant() func(*http.Request) (Scope, error) {
	return func(*http.Request) (Scope, error) { return Scope{}, nil }
}

// Cache keeps completed records closer than the store. Correctness does not depend on it:
// it never grants the right to run, and losing it only costs speed. It handles its own
// errors; if it cannot answer, it returns false.
type Cache interface {
	Get(ctx context.Context, id ID) (Record, bool)
	// Put keeps a record for at most its ExpiresIn.
	Put(ctx context.Context, record Record)
}

// New returns an engine on a store. It does no I/O. All bad values of cfg are reported at
// once, each as an [*oncemill.ConfigError].
func New(store Store, cfg Config) (*Engine, error) {
	if store == nil {
		return nil, &oncemill.ConfigError{Field: "idempotency.New store", Value: "nil", Problem: "a store is needed"}
	}
	cfg, err := cfg.resolve()
	codec, codecErr := newCodec(cfg.Responses.CompressAbove, cfg.Responses.Encryption)
	telemetry, telemetryErr := newTelemetry(cfg.Telemetry.MeterProvider)
	if telemetryErr != nil {
		telemetryErr = fmt.Errorf("idempotency: make metrics: %w", telemetryErr)
	}
	if err := errors.Join(err, codecErr, telemetryErr); err != nil {
		return nil, err
	}
	e := &Engine{store: store, cfg: cfg, codec: codec, hash: newHasher(cfg.Keys.Secret), telemetry: telemetry, at: func(string) {}}
	if shared, ok := store.(*SQLStore); ok && cfg.Transactions.GroupSize > 1 {
		e.groups = newGroups(e, shared)
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
		if err != nil || n == 0 {
			return total, err
		}
	}
}

func (e *Engine) purgeBatch(ctx context.Context) (int, error) {
	began := time.Now()
	n, err := e.store.Purge(ctx, e.cfg.Expiry.PurgeBatch)
	e.telemetry.latency(ctx, "purge", began, err)
	return n, err
}

// Run purges every PurgeEvery until ctx ends, and then returns nil. One process per
// service is enough; more do no harm. An error of the store is logged, and the purge is
// retried. If the tables of a [SQLStore] have not been created, it returns at once with an
// [*oncemill.SchemaError].
func (e *Engine) Run(ctx context.Context) error {
	if store, ok := e.store.(*SQLStore); ok {
		var schema *oncemill.SchemaError
		_, err := within(ctx, store, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, oncemill.CheckMigrated(ctx, store.db, store.where.Config(), Migrations)
		})
		if errors.As(err, &schema) && schema.Have < schema.Want {
			return fmt.Errorf("idempotency: %w", err)
		}
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if n, err := e.Purge(ctx); err != nil && ctx.Err() == nil {
			e.cfg.Logger.WarnContext(ctx, "purge failed", "error", err)
		} else if n > 0 {
			e.cfg.Logger.DebugContext(ctx, "keys purged", "count", n)
		}
		timer.Reset(e.cfg.Expiry.PurgeEvery)
	}
}
