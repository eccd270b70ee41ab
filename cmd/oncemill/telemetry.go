package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// telemetry is where a worker's metrics and spans go: to those who read /metrics, and to a
// collector of OTLP.
type telemetry struct {
	meters  metric.MeterProvider
	tracers trace.TracerProvider
	page    http.Handler // /metrics; nil if it is not served

	ends []func(context.Context) error // export what is left, and end
}

// flushTimeout is how long a worker that stops waits for a collector.
const flushTimeout = 5 * time.Second

// newTelemetry sets up what the standard variables of OpenTelemetry ask for, and /metrics if it is
// to be served. The worker's name becomes service.instance.id.
func newTelemetry(ctx context.Context, worker string, served bool, log *slog.Logger) (*telemetry, error) {
	t := &telemetry{meters: metricnoop.NewMeterProvider(), tracers: tracenoop.NewTracerProvider()}
	asked, err := readExports(os.LookupEnv)
	switch {
	case err != nil:
		return nil, &usageError{err}
	case asked.prometheus && !served:
		return nil, &usageError{errors.New("OTEL_METRICS_EXPORTER: prometheus requires --listen, where /metrics is served")}
	case asked.disabled:
		return t, nil
	}
	// The SDK has no other way to report that it cannot export.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("telemetry is incomplete", "error", abridged(err)) }))
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	attributes, err := resourceOf(ctx, worker)
	if err != nil { // OTEL_RESOURCE_ATTRIBUTES; what could be read of it counts
		log.WarnContext(ctx, "telemetry has not all of its attributes", "error", err)
	}
	if err := t.setUpMetrics(ctx, asked, served, attributes, log); err != nil {
		return nil, err
	}
	return t, t.setUpTraces(ctx, asked, attributes)
}

func (t *telemetry) setUpMetrics(ctx context.Context, asked exports, served bool, attributes *resource.Resource, log *slog.Logger) error {
	options := []sdkmetric.Option{sdkmetric.WithResource(attributes)}
	if served {
		registry := prometheus.NewRegistry()
		reader, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo())
		if err := errors.Join(err,
			registry.Register(collectors.NewGoCollector()), registry.Register(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))); err != nil {
			return err
		}
		options = append(options, sdkmetric.WithReader(reader))
		t.page = promhttp.HandlerFor(&gathered{from: registry}, promhttp.HandlerOpts{
			ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), ErrorHandling: promhttp.ContinueOnError,
		})
	}
	if asked.metrics {
		exporter, err := otlpmetrichttp.New(ctx)
		if err != nil {
			return err
		}
		options = append(options, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(exporter)))
	}
	if len(options) > 1 {
		provider := sdkmetric.NewMeterProvider(options...)
		t.meters, t.ends = provider, append(t.ends, provider.Shutdown)
	}
	return nil
}

func (t *telemetry) setUpTraces(ctx context.Context, asked exports, attributes *resource.Resource) error {
	if !asked.traces {
		return nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return errors.Join(err, t.end(ctx))
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(attributes), sdktrace.WithBatcher(exporter))
	t.tracers, t.ends = provider, append(t.ends, provider.Shutdown)
	return nil
}

// resourceOf describes the worker. The variables of OpenTelemetry override it.
func resourceOf(ctx context.Context, worker string) (*resource.Resource, error) {
	attributes := []attribute.KeyValue{attribute.String("service.name", "oncemill")}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		attributes = append(attributes, attribute.String("service.version", info.Main.Version))
	}
	if worker != "" {
		attributes = append(attributes, attribute.String("service.instance.id", worker))
	}
	return resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(attributes...), resource.WithFromEnv())
}

// end exports what has not been exported yet. It returns after flushTimeout at the latest, also
// if the collector is silent.
func (t *telemetry) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	errs := make(chan error, len(t.ends))
	for _, end := range t.ends {
		go func() { errs <- end(ctx) }() // ends with ctx, or with the process
	}
	var all []error
	for range t.ends {
		select {
		case err := <-errs:
			all = append(all, err)
		case <-ctx.Done():
			return errors.Join(append(all, ctx.Err())...)
		}
	}
	return errors.Join(all...)
}

// abridged returns the text of an error of an exporter, which may hold 4 MiB of the collector's
// answer.
func abridged(err error) string {
	const most = 500
	s := err.Error()
	if len(s) > most {
		s = s[:most] + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// gathered collects the metrics once for all who ask within gatheredFor.
type gathered struct {
	from prometheus.Gatherer

	mu     sync.Mutex // guards what follows
	until  time.Time
	latest []*dto.MetricFamily // not changed once it is here
	err    error
}

const gatheredFor = 500 * time.Millisecond

// Gather implements prometheus.Gatherer.
func (g *gathered) Gather() ([]*dto.MetricFamily, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !time.Now().Before(g.until) {
		g.latest, g.err = g.from.Gather()
		g.until = time.Now().Add(gatheredFor)
	}
	return g.latest, g.err
}
