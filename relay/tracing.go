package relay

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/internal/tracecontext"
)

// tracing creates the spans of publishing, by the semantic conventions for messaging. A
// message without a sampled trace costs one look at its metadata. It belongs to the loop.
type tracing struct {
	tracer trace.Tracer
	traces *tracecontext.Carrier
	open   map[*entry]struct{} // those with a span
}

func newTracing(cfg Config) tracing {
	guard := nopanic.NewTelemetry(cfg.Logger)
	return tracing{
		tracer: guard.Tracer(cfg.TracerProvider, "github.com/oncemill/oncemill/relay"),
		traces: tracecontext.New(guard.Propagator(cfg.Propagator)),
		open:   map[*entry]struct{}{},
	}
}

// begin starts the span of a message that is handed to the sink, and gives the message its
// trace, so that the consumer's span is below that of the attempt that has reached it.
func (t tracing) begin(ctx context.Context, m *entry) {
	if !t.traces.In(m.Metadata) {
		return
	}
	ctx = t.traces.Extract(ctx, m.Metadata)
	sent := trace.SpanContextFromContext(ctx)
	if !sent.IsSampled() {
		return
	}
	t.end(m, errNoOutcome) // of an earlier publish; usually there is none
	ctx, m.span = t.tracer.Start(ctx, "send "+m.Topic, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
		attribute.String("messaging.system", "oncemill"),
		attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.operation.name", "send"),
		attribute.String("messaging.destination.name", m.Topic),
		attribute.String("messaging.message.id", m.MessageID),
		attribute.Int("messaging.message.body.size", len(m.Payload)),
		attribute.Int("oncemill.lane", m.Lane),
	))
	if m.span.SpanContext().Equal(sent) { // no tracer: the trace is that of the producer
		m.span = nil
		return
	}
	t.open[m] = struct{}{}
	m.Metadata = t.traces.Replace(ctx, m.Metadata)
}

// errNoOutcome is the error of a span whose message was given up without an outcome.
var errNoOutcome = errors.New("no outcome")

// endAll ends the spans of messages that are still in flight when the loop ends.
func (t tracing) endAll() {
	for m := range t.open {
		t.end(m, errNoOutcome)
	}
}

// end ends the span of a message with its outcome.
func (t tracing) end(m *entry, err error) {
	if m.span == nil {
		return
	}
	if err != nil {
		m.span.SetStatus(codes.Error, text.Clean(err.Error()))
		m.span.SetAttributes(attribute.String("error.type", outcomeOf(err)))
	}
	m.span.End()
	m.span = nil
	delete(t.open, m)
}
