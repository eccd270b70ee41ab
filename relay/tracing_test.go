package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// A trace goes from the producer's context through the table into the span of
// each attempt, and from the last one on to the broker in the metadata.
func TestRelay_GoesOnWithTheProducersTrace(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	// As most services have it. Its names come in another order each time.
	propagator := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	box, err := outbox.New(p.db, outbox.Config{Database: p.cfg, History: outbox.NoHistory, Propagator: propagator})
	if err != nil {
		t.Fatal(err)
	}
	ctx, parent := provider.Tracer("shop").Start(t.Context(), "order")
	traced := message.NewMessage("traced", nil)
	traced.SetContext(ctx)
	err = box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
		return box.Publisher(tx).Publish("orders", traced, message.NewMessage("untraced", nil))
	})
	parent.End()
	if err != nil || len(traced.Metadata) != 0 {
		t.Fatalf("error %v, the caller's message has %v", err, traced.Metadata)
	}

	var header atomic.Value
	var tries atomic.Int32
	w := &wire{}
	start(t, box, &sink{name: "w", wire: w, handle: func(_ context.Context, m *relay.Message) error {
		if m.MessageID != "traced" {
			return nil
		}
		header.Store(m.Metadata["traceparent"])
		if tries.Add(1) == 1 {
			return relay.Unavailable(errors.New("not yet"))
		}
		return nil
	}}, relay.Config{TracerProvider: provider, Propagator: propagator})
	p.awaitNothingOwed(t)

	var sends []sdktrace.ReadOnlySpan
	for _, s := range spans.Ended() {
		if s.Name() == "send orders" {
			sends = append(sends, s)
		}
	}
	if len(sends) != 2 {
		t.Fatalf("%d spans, want one for each try", len(sends))
	}
	want := parent.SpanContext()
	for i, status := range []codes.Code{codes.Error, codes.Unset} {
		if s := sends[i]; s.Parent().SpanID() != want.SpanID() || s.SpanContext().TraceID() != want.TraceID() || s.Status().Code != status {
			t.Errorf("span %d: parent %v, status %v", i, s.Parent(), s.Status())
		}
	}
	carried := propagation.TraceContext{}.Extract(t.Context(), propagation.MapCarrier{"traceparent": header.Load().(string)})
	if got := trace.SpanContextFromContext(carried); got.TraceID() != want.TraceID() || got.SpanID() != sends[1].SpanContext().SpanID() {
		t.Errorf("the broker got the trace %q", header.Load())
	}
}

// Each span ends, also if the sink never answers: a span that does not end is never exported.
func TestRelay_EndsTheSpansOfMessagesWithoutAnOutcome(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	box := p.box(t)
	msg := message.NewMessage("a", nil)
	msg.Metadata.Set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	publish(t, box, "orders", msg)
	published := make(chan struct{}, 8)
	r, err := relay.New(box, silentSink{published}, relay.Config{TracerProvider: provider, Propagator: propagation.TraceContext{}, StopTimeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	<-published
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if begun, done := len(spans.Started()), spans.Ended(); begun != 1 || len(done) != 1 || done[0].Status().Code != codes.Error {
		t.Errorf("%d spans began, %d ended: %v", begun, len(done), done)
	}
}

// silentSink never reports an outcome.
type silentSink struct{ published chan struct{} }

func (silentSink) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (s silentSink) Publish(context.Context, []*relay.Message, func(*relay.Message, error)) {
	s.published <- struct{}{}
}
