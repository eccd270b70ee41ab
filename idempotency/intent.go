package idempotency

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// intent is a request or a command that is to run.
type intent struct {
	*core
	claim         Claim
	owner         Owner // of the claim, once it is granted
	transactional bool
	shares        bool          // its transaction may be that of a group
	unlimited     bool          // it has no caller: Quota and RateLimit are not for it
	claiming      *allowance    // of which its claim is under way; nil: none
	charged       *usage        // of which it has taken a key; nil: none
	retryIn       time.Duration // with decisionOverQuota and decisionRateLimited
	detached      bool          // it is claimed even if its caller goes away
	began         time.Time     // when time started to count: before the claim was sent
	deadline      time.Time     // of the attempts
	end           time.Time     // of all but the commit: a transaction that outlives its lease is worth nothing
	scope         Scope         // for RateLimit
	tenant        string        // for metrics, if wanted
	received      time.Time     // when the request or command came
	state         state
	span          trace.Span // nil: not traced
}

// newIntent fills in what all intents have in common.
func (c *core) newIntent(transactional bool) intent {
	in := intent{core: c, transactional: transactional, state: stateFailed}
	in.claim = Claim{Lease: c.cfg.Failures.Lease, Retention: c.cfg.Retention, Durable: !transactional}
	in.claim.Token = newToken(c.cfg.Failures.UniqueName)
	in.begin()
	return in
}

// begin starts the clock for the handler's time, and for how long the lease is trusted.
func (in *intent) begin() {
	in.began = time.Now()
	in.deadline = in.began.Add(in.cfg.Timeout)
	in.end = in.began.Add(in.cfg.Failures.Lease)
}

// claimContext returns a context for claiming.
func (in *intent) claimContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if in.detached {
		ctx = context.WithoutCancel(ctx)
	}
	return context.WithDeadline(ctx, in.deadline)
}

func (in *intent) keyHash() slog.Attr { return slog.String("key_hash", in.claim.ID.String()) }

// log logs an event. Of one that repeats, from warning on, some lines are at level debug.
func (in *intent) log(ctx context.Context, level slog.Level, event string, attrs ...slog.Attr) {
	var more []any
	if level >= slog.LevelWarn {
		level, more = in.events.of(event).Event(level, kindOf(in.claim.Endpoint, attrs))
	}
	in.logLine(ctx, level, event, more, attrs...)
}

// kindOf tells failures apart by their endpoint and error.
func kindOf(endpoint string, attrs []slog.Attr) string {
	for _, a := range attrs {
		if a.Key == "error" {
			return endpoint + " " + a.Value.String()
		}
	}
	return endpoint
}

func (in *intent) logLine(ctx context.Context, level slog.Level, event string, more []any, attrs ...slog.Attr) {
	if !in.cfg.Logger.Enabled(ctx, level) {
		return
	}
	line := append([]any{in.keyHash(), slog.String("endpoint", in.claim.Endpoint), slog.String("request_hash", in.claim.Fingerprint.String())}, more...)
	if in.tenant != "" {
		line = append(line, slog.String("tenant", in.tenant))
	}
	if in.claim.TraceID != "" {
		line = append(line, slog.String("trace_id", in.claim.TraceID))
	}
	for _, a := range attrs {
		line = append(line, a)
	}
	in.cfg.Logger.Log(ctx, level, event, line...) //nolint:sloglint // its callers have constants
}

// logDown logs that the store cannot be reached, and logWorks that it can again.
func (in *intent) logDown(ctx context.Context, err error) {
	level, more := in.events.of(storeUnavailable).Failed(slog.LevelError, err.Error())
	in.logLine(ctx, level, storeUnavailable, more, slog.Any("error", err))
}

func (in *intent) logWorks(ctx context.Context) {
	if attrs, report := in.events.of(storeUnavailable).Over(); report {
		in.cfg.Logger.InfoContext(ctx, "idempotency store available again", attrs...)
	}
}

const storeUnavailable = "idempotency store unavailable"

// count adds one, with the attributes of the intent and, if there is one, the status of
// the answer.
func (in *intent) count(ctx context.Context, c metric.Int64Counter, status int) {
	attrs := []attribute.KeyValue{attribute.String("endpoint", in.telemetry.endpoints.Of(in.claim.Endpoint))}
	if status != 0 {
		attrs = append(attrs, attribute.Int("status", status))
	}
	if in.tenant != "" {
		attrs = append(attrs, attribute.String("tenant", in.tenant))
	}
	c.Add(ctx, 1, metric.WithAttributes(attrs...))
}

// sealed fills in the response, and encrypts the other stored fields.
func (in *intent) sealed(c Completion, plain []byte) (_ Completion, err error) {
	of := in.claim.binding()
	c.Location = in.codec.encodeText(of, "location", c.Location)
	c.ResourceID = in.codec.encodeText(of, "resource id", c.ResourceID)
	if c.State == StateNotReplayable {
		return c, nil
	}
	c.Response, err = in.codec.encode(of, plain)
	c.Large = len(c.Response) > in.cfg.Responses.LargeAbove && c.Refuse == 0
	return c, err
}

// encoded fills in the stored form of a response.
func (in *intent) encoded(c Completion, res *response) (Completion, error) {
	kept := in.kept(res)
	c.Location = printable(kept.header("Location"), mostLocation)
	if in.cfg.Responses.Pointer {
		kept.body, kept.Pointer = nil, true
		kept.Header = slices.DeleteFunc(slices.Clone(kept.Header), func(e headerEntry) bool { return e.Name == "Content-Type" && in.cfg.Responses.Resolve == nil })
	}
	plain, err := kept.marshal()
	if err != nil {
		return c, err
	}
	return in.sealed(c, plain)
}

const mostLocation = 2048
