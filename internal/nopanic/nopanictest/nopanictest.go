// Package nopanictest has telemetry that panics, for tests.
package nopanictest

import (
	"context"

	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// Tracers provide tracers that panic with "no tracer" when a span begins.
type Tracers struct{ tracenoop.TracerProvider }

// Tracer implements [trace.TracerProvider].
func (Tracers) Tracer(string, ...trace.TracerOption) trace.Tracer { return tracer{} }

type tracer struct{ tracenoop.Tracer }

func (tracer) Start(context.Context, string, ...trace.SpanStartOption) (context.Context, trace.Span) {
	panic("no tracer")
}

// Meters provide counters and histograms that panic with "no meter".
type Meters struct{ metricnoop.MeterProvider }

// Meter implements [metric.MeterProvider].
func (Meters) Meter(string, ...metric.MeterOption) metric.Meter { return meter{} }

type meter struct{ metricnoop.Meter }

func (meter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return counter{}, nil
}

func (meter) Float64Histogram(string, ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return histogram{}, nil
}

type counter struct{ metricnoop.Int64Counter }

func (counter) Add(context.Context, int64, ...metric.AddOption) { panic("no meter") }

type histogram struct{ metricnoop.Float64Histogram }

func (histogram) Enabled(context.Context) bool { return true }

func (histogram) Record(context.Context, float64, ...metric.RecordOption) { panic("no meter") }
