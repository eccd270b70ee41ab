package inbox

import (
	"context"
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// outcome of an attempt to handle a message. All but the first two are failures,
// and the value of their error.type.
type outcome string

const (
	handled        outcome = "handled"
	duplicate      outcome = "duplicate"
	badMessageID   outcome = "message_id"
	badPayload     outcome = "payload"
	beingHandled   outcome = "being_handled"
	handlerFailed  outcome = "handler"
	databaseFailed outcome = "database"
	commitUnknown  outcome = "commit_unknown"
)

// telemetry counts attempts by their outcome. Attributes: the consumer, the
// topic if the message came through a router, and the kind of a failure.
type telemetry struct {
	consumer   attribute.KeyValue
	handled    metric.Int64Counter
	duplicates metric.Int64Counter
	failed     metric.Int64Counter
}

func newTelemetry(provider metric.MeterProvider, consumer string) (*telemetry, error) {
	meter := provider.Meter("github.com/oncemill/oncemill/inbox")
	t := &telemetry{consumer: attribute.String("messaging.consumer.group.name", consumer)}
	var errs [3]error
	t.handled, errs[0] = meter.Int64Counter("oncemill.inbox.handled", metric.WithUnit("{message}"),
		metric.WithDescription("Messages whose effects were committed."))
	t.duplicates, errs[1] = meter.Int64Counter("oncemill.inbox.duplicates", metric.WithUnit("{message}"),
		metric.WithDescription("Deliveries that were acknowledged without running the handler."))
	t.failed, errs[2] = meter.Int64Counter("oncemill.inbox.failed", metric.WithUnit("{message}"),
		metric.WithDescription("Attempts that left nothing behind, or whose commit has an unknown outcome."))
	return t, errors.Join(errs[:]...)
}

func (t *telemetry) record(ctx context.Context, result outcome) {
	attrs := []attribute.KeyValue{t.consumer}
	if topic := message.SubscribeTopicFromCtx(ctx); topic != "" {
		attrs = append(attrs, attribute.String("messaging.destination.name", topic))
	}
	counter := t.failed
	switch result {
	case handled:
		counter = t.handled
	case duplicate:
		counter = t.duplicates
	default:
		attrs = append(attrs, attribute.String("error.type", string(result)))
	}
	counter.Add(ctx, 1, metric.WithAttributes(attrs...))
}
