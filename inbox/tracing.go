package inbox

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/internal/tracecontext"
)

// tracing creates the spans of deliveries and groups, by the semantic conventions for
// messaging. A message without a trace costs one look at its metadata.
type tracing struct {
	tracer   trace.Tracer
	traces   *tracecontext.Carrier
	consumer attribute.KeyValue
}

func newTracing(cfg Config, guard *nopanic.Telemetry) tracing {
	return tracing{
		tracer:   guard.Tracer(cfg.TracerProvider, "github.com/oncemill/oncemill/inbox"),
		traces:   tracecontext.New(guard.Propagator(cfg.Propagator)),
		consumer: attribute.String("messaging.consumer.group.name", cfg.Consumer),
	}
}

// begin starts the span of a delivery. A span in ctx, for example of an instrumented router,
// is the parent, and the trace of the metadata becomes a link. An unsampled trace makes no
// span, but is passed on in the context, so that nothing below begins a trace anew.
func (t *tracing) begin(ctx context.Context, w *work, topic string) context.Context {
	metadata := w.msg.Metadata
	var options []trace.SpanStartOption
	switch parent := trace.SpanContextFromContext(ctx); {
	case parent.IsSampled():
		if sent := t.traces.Of(metadata); sent.IsValid() && sent.SpanID() != parent.SpanID() {
			options = append(options, trace.WithLinks(trace.Link{SpanContext: sent}))
		}
	case parent.IsValid() || !t.traces.In(metadata):
		return ctx
	default:
		ctx = t.traces.Extract(ctx, metadata)
		if !trace.SpanContextFromContext(ctx).IsSampled() {
			return ctx
		}
	}
	ctx, w.span = t.tracer.Start(ctx, "process "+topic, append(options,
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(t.attributes(topic,
			attribute.String("messaging.message.id", shown(w.msg.UUID)),
			attribute.Int("messaging.message.body.size", len(w.msg.Payload)),
		)...))...)
	return ctx
}

// shown returns an id or key that anybody may have chosen, for spans and logs.
func shown(id string) string {
	if text.Check(id, maxID) != "" {
		return text.Shorten(id)
	}
	return id
}

func (t *tracing) attributes(topic string, more ...attribute.KeyValue) []attribute.KeyValue {
	return append([]attribute.KeyValue{
		attribute.String("messaging.system", "oncemill"),
		attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.operation.name", "process"),
		attribute.String("messaging.destination.name", topic),
		t.consumer,
	}, more...)
}

// end ends the span of a delivery. A dead letter is an error, too, although it is
// acknowledged.
func (t *tracing) end(w *work, err error, textOf func(error) string) {
	if w.span == nil {
		return
	}
	w.span.SetAttributes(attribute.String("oncemill.outcome", w.ended(err)))
	switch {
	case err != nil:
		endSpan(w.span, w.kind(err), err, textOf)
		return
	case w.dead:
		w.span.SetAttributes(attribute.String("error.type", string(w.kind(nil))))
		w.span.SetStatus(codes.Error, "dead-lettered")
	}
	w.span.End()
}

// endSpan ends a span, which may be nil, with its error.
func endSpan(span trace.Span, kind outcome, err error, textOf func(error) string) {
	if span == nil {
		return
	}
	if err != nil {
		span.SetAttributes(attribute.String("error.type", string(kind)))
		span.SetStatus(codes.Error, text.Clean(textOf(err)))
	}
	span.End()
}

// beginGroup starts the span of one transaction of several messages, if one of them has a
// span: it belongs to the trace of the first that has, and links to all.
func (t *tracing) beginGroup(ctx context.Context, members []*member) (context.Context, trace.Span) {
	var first *member
	for _, m := range members {
		if m.Work.span != nil {
			first = m
			break
		}
	}
	if first == nil {
		return ctx, nil
	}
	links := make([]trace.Link, 0, len(members))
	for _, m := range members {
		if of := trace.SpanContextFromContext(m.Context()); of.IsValid() {
			links = append(links, trace.Link{SpanContext: of, Attributes: []attribute.KeyValue{attribute.String("messaging.message.id", m.ID)}})
		}
	}
	topic := message.SubscribeTopicFromCtx(first.Context())
	return t.tracer.Start(trace.ContextWithSpan(ctx, first.Work.span), "process "+topic, trace.WithLinks(links...), //nolint:spancheck // the caller ends it
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(t.attributes(topic, attribute.Int("messaging.batch.message_count", len(members)))...))
}

// continued returns the messages that a handler returned. One that the handler passes on with
// the metadata it came with continues the trace of the handler instead.
func (t *tracing) continued(w *work, produced []*message.Message) []*message.Message {
	if w.span == nil {
		return produced
	}
	came := t.traces.Of(w.msg.Metadata)
	if !came.IsValid() {
		return produced
	}
	out := make([]*message.Message, len(produced))
	for i, msg := range produced {
		if out[i] = msg; msg == nil || !t.traces.Of(msg.Metadata).Equal(came) {
			continue
		}
		out[i] = msg.Copy()
		out[i].SetContext(msg.Context())
		out[i].Metadata = t.traces.Without(msg.Metadata)
	}
	return out
}
