package relay

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// tracing creates the spans of publishing, by the semantic conventions for messaging. A
// message without a sampled trace costs one look at its metadata.
type tracing struct {
	tracer     trace.Tracer
	propagator propagation.TextMapPropagator
	field      string // what a message with a trace has
}

func newTracing(cfg Config) tracing {
	t := tracing{tracer: cfg.TracerProvider.Tracer("github.com/oncemill/oncemill/relay"), propagator: cfg.Propagator}
	if fields := cfg.Propagator.Fields(); len(fields) > 0 {
		t.field = fields[0]
	}
	return t
}

// begin starts the span of a message that is handed to the sink.
func (t tracing) begin(ctx context.Context, m *entry) {
	if t.field == "" || m.Metadata[t.field] == "" {
		return
	}
	ctx = t.propagator.Extract(ctx, propagation.MapCarrier(m.Metadata))
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return
	}
	_, m.span = t.tracer.Start(ctx, "send "+m.Topic, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
		attribute.String("messaging.system", "oncemill"),
		attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.operation.name", "relay"),
		attribute.String("messaging.destination.name", m.Topic),
		attribute.String("messaging.message.id", m.MessageID),
		attribute.Int("messaging.message.body.size", len(m.Payload)),
		attribute.Int("oncemill.lane", m.Lane),
	))
}

// end ends the span of a message with its outcome.
func (t tracing) end(m *entry, err error) {
	if m.span == nil {
		return
	}
	if err != nil {
		m.span.SetStatus(codes.Error, err.Error())
	}
	m.span.End()
	m.span = nil
}
