package nopanic

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// telemetryEvery is the least time between two lines about panics of telemetry.
const telemetryEvery = time.Minute

// Telemetry keeps the panics of a user's tracers, meters and propagators from the worker that calls
// them. What such a call would have recorded is lost. It logs a panic a minute, with the number of
// those since. It is safe for concurrent use.
type Telemetry struct {
	log *slog.Logger

	mu     sync.Mutex // guards what follows
	logged time.Time
	n      int
}

// NewTelemetry returns a Telemetry that logs to log.
func NewTelemetry(log *slog.Logger) *Telemetry { return &Telemetry{log: log} }

// recovered ends a panic of the function that defers it.
func (t *Telemetry) recovered() {
	if v := recover(); v != nil {
		t.report(v)
	}
}

func (t *Telemetry) report(v any) {
	t.mu.Lock()
	t.n++
	n, now := t.n, time.Now()
	due := t.logged.IsZero() || now.Sub(t.logged) >= telemetryEvery
	if due {
		t.logged, t.n = now, 0
	}
	t.mu.Unlock()
	if due {
		t.log.Error("telemetry panicked; what it should record is lost", "panic", fmt.Sprint(v), "panics", n)
	}
}

// Counter returns c without its panics.
func (t *Telemetry) Counter(c metric.Int64Counter) metric.Int64Counter {
	if c == nil {
		return metricnoop.Int64Counter{}
	}
	return counter{c, t}
}

type counter struct {
	metric.Int64Counter
	t *Telemetry
}

func (c counter) Add(ctx context.Context, n int64, options ...metric.AddOption) {
	defer c.t.recovered()
	c.Int64Counter.Add(ctx, n, options...)
}

// Histogram returns h without its panics.
func (t *Telemetry) Histogram(h metric.Float64Histogram) metric.Float64Histogram {
	if h == nil {
		return metricnoop.Float64Histogram{}
	}
	return histogram{h, t}
}

type histogram struct {
	metric.Float64Histogram
	t *Telemetry
}

func (h histogram) Record(ctx context.Context, v float64, options ...metric.RecordOption) {
	defer h.t.recovered()
	h.Float64Histogram.Record(ctx, v, options...)
}

func (h histogram) Enabled(ctx context.Context) (on bool) {
	defer h.t.recovered()
	return h.Float64Histogram.Enabled(ctx)
}

// Tracer returns a tracer of the provider without its panics. A span that could not be started
// records nothing. The spans in contexts are the provider's own.
func (t *Telemetry) Tracer(provider trace.TracerProvider, name string) trace.Tracer {
	made := tracer{Tracer: tracenoop.Tracer{}, t: t}
	func() {
		defer t.recovered()
		made.Tracer = provider.Tracer(name)
	}()
	return made
}

type tracer struct {
	trace.Tracer
	t *Telemetry
}

func (w tracer) Start(ctx context.Context, name string, options ...trace.SpanStartOption) (within context.Context, s trace.Span) {
	within, s = ctx, trace.SpanFromContext(trace.ContextWithRemoteSpanContext(ctx, trace.SpanContextFromContext(ctx))) //nolint:wastedassign // what a panic leaves: a span that records nothing
	defer w.t.recovered()
	began, made := w.Tracer.Start(ctx, name, options...)
	return began, span{made, w.t}
}

type span struct {
	trace.Span
	t *Telemetry
}

func (s span) End(options ...trace.SpanEndOption) {
	defer s.t.recovered()
	s.Span.End(options...)
}

func (s span) SetStatus(code codes.Code, description string) {
	defer s.t.recovered()
	s.Span.SetStatus(code, description)
}

func (s span) SetAttributes(attributes ...attribute.KeyValue) {
	defer s.t.recovered()
	s.Span.SetAttributes(attributes...)
}

func (s span) SpanContext() (c trace.SpanContext) {
	defer s.t.recovered()
	return s.Span.SpanContext()
}

// Propagator returns p without its panics.
func (t *Telemetry) Propagator(p propagation.TextMapPropagator) propagation.TextMapPropagator {
	return propagator{p, t}
}

type propagator struct {
	propagation.TextMapPropagator
	t *Telemetry
}

func (p propagator) Inject(ctx context.Context, carrier propagation.TextMapCarrier) {
	defer p.t.recovered()
	p.TextMapPropagator.Inject(ctx, carrier)
}

func (p propagator) Extract(ctx context.Context, carrier propagation.TextMapCarrier) (within context.Context) {
	within = ctx //nolint:wastedassign // what a panic leaves
	defer p.t.recovered()
	return p.TextMapPropagator.Extract(ctx, carrier)
}

func (p propagator) Fields() (names []string) {
	defer p.t.recovered()
	return p.TextMapPropagator.Fields()
}
