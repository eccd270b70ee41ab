package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/labels"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

// metrics are the instruments of a relay. Names follow OpenTelemetry: a prefix and a
// noun, with the unit separate.
type metrics struct {
	outcomes  metric.Int64Counter
	takeovers metric.Int64Counter
	lost      metric.Int64Counter
	missed    metric.Int64Counter
	truncated metric.Int64Counter
	retries   metric.Int64Counter
	dead      metric.Int64Counter
	setAside  metric.Int64Counter
	moved     metric.Int64Counter
	archived  metric.Int64Counter

	// held is what the upkeep has found to block it; nil if another worker does the
	// upkeep.
	held atomic.Pointer[outboxstore.Held]

	backlog  backlogGauges
	duration metric.Float64Histogram
	topics   labels.Set // of duration
	circuits circuitGauge

	confirmed, refused, unroutable, unavailable, unknown metric.MeasurementOption
}

func newMetrics(provider metric.MeterProvider, guard *nopanic.Telemetry) (*metrics, error) {
	meter := provider.Meter("github.com/oncemill/oncemill/relay")
	m := &metrics{
		confirmed:   outcome("confirmed"),
		refused:     outcome("refused"),
		unroutable:  outcome("unroutable"), // the message's fault or its topic's
		unavailable: outcome("unavailable"),
		unknown:     outcome("unknown"),
	}
	var errs []error
	counter := func(name, unit, description string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return guard.Counter(c)
	}
	m.outcomes = counter("oncemill.relay.outcomes", "{message}", "Outcomes of publishing, by outcome. A message has one for each time it was handed to the sink.")
	m.takeovers = counter("oncemill.relay.takeovers", "{lane}", "Lanes taken from a worker whose lease had expired.")
	m.lost = counter("oncemill.relay.lost_lanes", "{lane}", "Lanes that another worker took from this one.")
	m.missed = counter("oncemill.relay.history_missed", "{message}", "Delivered messages that could not be kept in the history.")
	m.retries = counter("oncemill.relay.retries", "{message}", "Failed attempts after which a message waits for the next one.")
	m.dead = counter("oncemill.relay.dead_letters", "{message}", "Messages that became dead letters.")
	m.setAside = counter("oncemill.relay.set_aside", "{message}", "Messages put off at no charge, since their topic is unavailable or nobody takes them, each time they are.")
	m.truncated = counter("oncemill.relay.ring_truncated", "{partition}", "Partitions of the outbox emptied of dead rows.")
	m.archived = counter("oncemill.relay.history_archived", "{message}", "Delivered messages that outbox.Config.Archive took and the history gave up.")
	m.moved = counter("oncemill.relay.scheduled_moved", "{message}", "Scheduled messages whose time has come, moved into the outbox.")
	gauge := func(name, description string, holders func(*outboxstore.Held) []outboxstore.Holder) {
		_, err := meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(description),
			metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
				held := m.held.Load()
				if held == nil {
					return nil
				}
				for _, h := range holders(held) {
					o.Observe(h.Age.Seconds(), metric.WithAttributes(
						attribute.String("kind", h.Kind), attribute.String("application", h.Application), attribute.Int("pid", h.PID)))
				}
				return nil
			}))
		errs = append(errs, err)
	}
	gauge("oncemill.relay.ring_blocked", "Ages of the transactions whose locks keep dead rows of the outbox from being removed.",
		func(h *outboxstore.Held) []outboxstore.Holder { return h.Blocked })
	gauge("oncemill.relay.oldest_snapshot", "Age of the transaction whose snapshot is the oldest of the server; vacuum removes nothing younger.",
		func(h *outboxstore.Held) []outboxstore.Holder {
			if h.Oldest == nil {
				return nil
			}
			return []outboxstore.Holder{*h.Oldest}
		})
	var err error
	m.duration, err = meter.Float64Histogram("messaging.client.operation.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from handing a message to the sink to its outcome."), metric.WithExplicitBucketBoundaries(durationBounds...))
	m.duration = guard.Histogram(m.duration)
	errs = append(errs, err, m.circuits.register(meter), m.backlog.register(meter))
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("relay: metrics: %w", err)
	}
	return m, nil
}

func outcome(value string) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", value)))
}

// tally counts the outcomes of one turn of the worker's loop.
type tally struct{ confirmed, refused, unroutable, unavailable, unknown int64 }

func (t *tally) add(err error) {
	switch outcomeOf(err) {
	case "confirmed":
		t.confirmed++
	case "unroutable":
		t.unroutable++
	case "refused":
		t.refused++
	case "unavailable":
		t.unavailable++
	default:
		t.unknown++
	}
}

// outcomeOf names an outcome for metrics and spans.
func outcomeOf(err error) string {
	switch {
	case err == nil:
		return "confirmed"
	case errors.Is(err, ErrUnroutable):
		return "unroutable"
	case errors.Is(err, ErrRefused):
		return "refused"
	case errors.Is(err, ErrUnavailable):
		return "unavailable"
	}
	return "unknown"
}

func (m *metrics) record(ctx context.Context, t tally) {
	for _, part := range []struct {
		n  int64
		as metric.MeasurementOption
	}{{t.confirmed, m.confirmed}, {t.refused, m.refused}, {t.unroutable, m.unroutable}, {t.unavailable, m.unavailable}, {t.unknown, m.unknown}} {
		if part.n > 0 {
			m.outcomes.Add(ctx, part.n, part.as)
		}
	}
}
