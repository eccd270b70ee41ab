package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/labels"
)

// traced returns an engine whose spans and metrics can be read.
func traced(t *testing.T, store idempotency.Store) (*idempotency.Engine, *tracetest.SpanRecorder, *metric.ManualReader, trace.Tracer) {
	t.Helper()
	spans, reader := tracetest.NewSpanRecorder(), metric.NewManualReader()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans), sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.AlwaysSample())))
	engine := newEngine(t, store, func(c *idempotency.Config) {
		c.Telemetry.TracerProvider = provider
		c.Telemetry.MeterProvider = metric.NewMeterProvider(metric.WithReader(reader))
	})
	return engine, spans, reader, provider.Tracer("test")
}

func attrOf(span sdktrace.ReadOnlySpan, name string) string {
	for _, attr := range span.Attributes() {
		if string(attr.Key) == name {
			return attr.Value.String()
		}
	}
	return ""
}

// durations returns the counts of idempotency.request.duration, by endpoint and state.
func durations(t *testing.T, reader metric.Reader) map[string]uint64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	found := map[string]uint64{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			data, ok := m.Data.(metricdata.Histogram[float64])
			if m.Name != "idempotency.request.duration" || !ok {
				continue
			}
			for _, p := range data.DataPoints {
				endpoint, _ := p.Attributes.Value(attribute.Key("endpoint"))
				state, _ := p.Attributes.Value(attribute.Key("state"))
				found[endpoint.AsString()+" "+state.AsString()] = p.Count
			}
		}
	}
	return found
}

func TestMiddleware_TracesARequestBelowTheSpanOfTheServer(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine, spans, reader, tracer := traced(t, store)
		var within trace.SpanContext
		mux := http.NewServeMux()
		mux.Handle("POST /orders", engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			within = trace.SpanContextFromContext(r.Context())
			_, _ = io.WriteString(w, "done")
		})))
		var parents []trace.SpanContext
		send := func(body string) {
			ctx, server := tracer.Start(t.Context(), "POST /orders")
			do(t, mux, post("/orders", body).WithContext(ctx))
			server.End()
			parents = append(parents, server.SpanContext())
		}
		send("x") // executed
		first := parents[0].TraceID().String()
		send("x") // replayed
		send("y") // mismatch

		var got []sdktrace.ReadOnlySpan
		for _, span := range spans.Ended() {
			if span.Name() == "idempotency POST /probe" {
				got = append(got, span)
			}
		}
		if len(got) != 3 {
			t.Fatalf("%d spans", len(got))
		}
		hash := attrOf(got[0], "oncemill.idempotency.key_hash")
		for i, state := range []string{"executed", "replayed", "mismatch"} {
			span := got[i]
			if span.Parent().SpanID() != parents[i].SpanID() || attrOf(span, "oncemill.idempotency.state") != state || span.Status().Code != codes.Unset ||
				attrOf(span, "oncemill.idempotency.key_hash") != hash || len(hash) != 12 {
				t.Errorf("%s: parent %v, %v, status %v", state, span.Parent().SpanID(), span.Attributes(), span.Status())
			}
			if strings.Contains(fmt.Sprint(span.Attributes()), `"key"`) {
				t.Errorf("%s: the key is in %v", state, span.Attributes())
			}
		}
		if within.SpanID() != got[0].SpanContext().SpanID() {
			t.Error("the handler's context has another span")
		}
		if attrOf(got[1], "oncemill.idempotency.first_trace_id") != first || attrOf(got[0], "oncemill.idempotency.first_trace_id") != "" {
			t.Errorf("the replay names the trace %q, want %q", attrOf(got[1], "oncemill.idempotency.first_trace_id"), first)
		}
		if d := durations(t, reader); len(d) != 3 || d["POST /probe executed"] != 1 || d["POST /probe replayed"] != 1 || d["POST /probe mismatch"] != 1 {
			t.Errorf("durations: %v", d)
		}
	})
}

func TestMiddleware_EndsTheSpanOfAPanic(t *testing.T) {
	t.Parallel()
	engine, spans, reader, _ := traced(t, &idempotency.MemoryStore{})
	func() {
		defer func() { _ = recover() }()
		do(t, engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("no") })), post("/", "x"))
	}()
	got := spans.Ended()
	if len(got) != 1 || attrOf(got[0], "oncemill.idempotency.state") != "unknown" || got[0].Status().Code != codes.Error {
		t.Errorf("spans: %v", got)
	}
	if d := durations(t, reader); d["POST /probe unknown"] != 1 {
		t.Errorf("durations: %v", d)
	}
}

func TestMiddleware_MakesNoSpanBelowAnUnsampledOne(t *testing.T) {
	t.Parallel()
	engine, spans, _, _ := traced(t, &idempotency.MemoryStore{})
	unsampled := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1}})
	var within trace.SpanContext
	handler := engine.Middleware(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { within = trace.SpanContextFromContext(r.Context()) }))
	do(t, handler, post("/", "x").WithContext(trace.ContextWithSpanContext(t.Context(), unsampled)))
	if len(spans.Ended()) != 0 || within.SpanID() != unsampled.SpanID() {
		t.Errorf("%d spans; the handler has %v", len(spans.Ended()), within.SpanID())
	}
}

func TestDo_TracesACommand(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine, spans, reader, tracer := traced(t, store)
		ctx, job := tracer.Start(t.Context(), "job")
		run := func(key string, payload any) {
			_, _ = idempotency.Do(ctx, engine, idempotency.Command{Name: "close-month", Key: key, Payload: payload}, func(context.Context) (int, error) {
				if key == "bad" {
					return 0, errors.New("no")
				}
				return 1, nil
			})
		}
		run("good", 1)
		run("good", 1)
		run("good", 2)
		run("bad", 1)
		job.End()
		var states []string
		for _, span := range spans.Ended() {
			if span.Name() == "idempotency command close-month" && span.Parent().SpanID() == job.SpanContext().SpanID() {
				states = append(states, attrOf(span, "oncemill.idempotency.state"))
			}
		}
		failed := "unknown"
		if _, transactional := store.(*idempotency.SQLStore); transactional {
			failed = "released"
		}
		if want := []string{"executed", "replayed", "mismatch", failed}; !slices.Equal(states, want) {
			t.Errorf("states %q, want %q", states, want)
		}
		if d := durations(t, reader); len(d) != 4 || d["command close-month "+failed] != 1 {
			t.Errorf("durations: %v", d)
		}
	})
}

// A scope may take its route from the path, of which strangers can send any number.
func TestMiddleware_PoolsTheRoutesBeyondTheFirst(t *testing.T) {
	t.Parallel()
	reader := metric.NewManualReader()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Telemetry.MeterProvider = metric.NewMeterProvider(metric.WithReader(reader))
		c.Keys.MaxOutstanding = idempotency.Unlimited
		c.Scope = func(r *http.Request) (idempotency.Scope, error) {
			return idempotency.Scope{Tenant: "one", Route: r.URL.Path}, nil
		}
	})
	handler := engine.Middleware(ok("done"))
	for i := range labels.Most + 50 {
		do(t, handler, post(fmt.Sprint("/", i), "x"))
	}
	d := durations(t, reader)
	if len(d) != labels.Most+1 || d[labels.Other+" executed"] != 50 {
		t.Errorf("%d endpoints, %d in the last", len(d), d[labels.Other+" executed"])
	}
}
