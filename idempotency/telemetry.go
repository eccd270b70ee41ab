package idempotency

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/labels"
	"github.com/oncemill/oncemill/internal/nopanic"
)

// telemetry holds the metrics of an engine. docs/idempotency.md explains what each means
// for an operator.
type telemetry struct {
	received, started, replayed, inProgress, mismatched metric.Int64Counter
	completeFailures, takeovers, stale, cacheHits       metric.Int64Counter
	cacheMisses, unknown, plainRefused                  metric.Int64Counter
	storeLatency, duration                              metric.Float64Histogram
	endpoints                                           labels.Set
}

func newTelemetry(provider metric.MeterProvider, guard *nopanic.Telemetry) (*telemetry, error) {
	meter := provider.Meter("github.com/oncemill/oncemill/idempotency")
	t := &telemetry{}
	var errs []error
	counter := func(name, description string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithUnit("{request}"), metric.WithDescription(description))
		errs = append(errs, err)
		return guard.Counter(c)
	}
	t.received = counter("idempotency.received_total", "Requests that came with a key.")
	t.started = counter("idempotency.started_total", "Requests that were run, the first time or after a failure.")
	t.replayed = counter("idempotency.replayed_total", "Requests that were answered with a stored response.")
	t.inProgress = counter("idempotency.in_progress_conflicts_total", "Requests that came while their key was running.")
	t.mismatched = counter("idempotency.mismatched_hash_conflicts_total", "Keys that came with another request.")
	t.completeFailures = counter("idempotency.complete_failures_total", "Responses that could not be stored.")
	t.takeovers = counter("idempotency.takeovers_total", "Keys that were taken over from an owner whose lease had ended.")
	t.stale = counter("idempotency.stale_owner_total", "Runs that lost their key to another owner.")
	t.unknown = counter("idempotency.outcome_unknown_total", "Requests whose earlier run has an unknown outcome.")
	t.plainRefused = counter("idempotency.plain_refused_total", "Stored responses that were refused because they were not encrypted.")
	t.cacheHits = counter("idempotency.cache_hits_total", "Replays that the cache answered.")
	t.cacheMisses = counter("idempotency.cache_misses_total", "Requests for which the store was asked.")
	var err error
	t.storeLatency, err = meter.Float64Histogram("idempotency.store_latency", metric.WithUnit("s"),
		metric.WithDescription("Time that an operation of the store took."),
		metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10))
	errs = append(errs, err)
	t.duration, err = meter.Float64Histogram("idempotency.request.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from a request or command with a key to its answer, by endpoint and state."),
		metric.WithExplicitBucketBoundaries(.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10))
	t.storeLatency, t.duration = guard.Histogram(t.storeLatency), guard.Histogram(t.duration)
	return t, errors.Join(append(errs, err)...)
}

func (t *telemetry) latency(ctx context.Context, operation string, began time.Time, err error) {
	result := "ok"
	if err != nil && !errors.Is(err, ErrStaleOwner) {
		result = "error"
	}
	t.storeLatency.Record(ctx, time.Since(began).Seconds(), metric.WithAttributes(
		attribute.String("operation", operation), attribute.String("result", result)))
}
