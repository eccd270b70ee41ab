package idempotency

import (
	"context"
	"crypto/rand"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// intent is a request or a command that is to run.
type intent struct {
	*core
	claim         Claim
	owner         Owner // of the claim, once it is in hand
	transactional bool
	shares        bool      // its transaction may be that of a group
	detached      bool      // it is claimed although its caller goes away
	began         time.Time // when time started to count: before the claim was sent
	deadline      time.Time // of the attempts
	end           time.Time // of all but the commit: a transaction that outlives its lease is worth nothing
	tenant        string    // for metrics, if wanted
}

// newIntent fills in what all intents have in common.
func (c *core) newIntent(transactional bool) intent {
	in := intent{core: c, transactional: transactional}
	in.claim = Claim{Lease: c.cfg.Failures.Lease, Retention: c.cfg.Retention, Durable: !transactional}
	rand.Read(in.claim.Token[:])
	in.begin()
	return in
}

// begin starts the clock for the handler's time, and for how long the lease is trusted.
func (in *intent) begin() {
	in.began = time.Now()
	in.deadline = in.began.Add(in.cfg.Timeout)
	in.end = in.began.Add(in.cfg.Failures.Lease)
}

// patient returns a context for claiming.
func (in *intent) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	if in.detached {
		ctx = context.WithoutCancel(ctx)
	}
	return context.WithDeadline(ctx, in.deadline)
}

func (in *intent) keyHash() slog.Attr { return slog.String("key_hash", in.claim.ID.String()) }

func (in *intent) log(ctx context.Context, level slog.Level, event string, attrs ...slog.Attr) {
	in.cfg.Logger.LogAttrs(ctx, level, event, //nolint:sloglint // its callers have constants
		append([]slog.Attr{in.keyHash(), slog.String("endpoint", in.claim.Endpoint)}, attrs...)...)
}

// count adds one, with the attributes of the intent and, if there is one, the status of
// the answer.
func (in *intent) count(ctx context.Context, c metric.Int64Counter, status int) {
	attrs := []attribute.KeyValue{attribute.String("endpoint", in.claim.Endpoint)}
	if status != 0 {
		attrs = append(attrs, attribute.Int("status", status))
	}
	if in.tenant != "" {
		attrs = append(attrs, attribute.String("tenant", in.tenant))
	}
	c.Add(ctx, 1, metric.WithAttributes(attrs...))
}
