package inbox

import (
	"context"
	"errors"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// outcome is the outcome of an attempt to handle a message. Most are failures, and the
// value of their error.type.
type outcome string

const (
	outcomeHandled        outcome = "handled"
	outcomeDuplicate      outcome = "duplicate"
	outcomeBadMessageID   outcome = "message_id"
	outcomeBadPayload     outcome = "payload"
	outcomeBeingHandled   outcome = "being_handled"
	outcomeHandlerFailed  outcome = "handler"
	outcomeDatabaseFailed outcome = "database"
	outcomeCommitRefused  outcome = "commit"
	outcomeDatabaseDown   outcome = "database_away"
	outcomeCommitUnknown  outcome = "commit_unknown"
	outcomeConflict       outcome = "conflict"
	outcomeUnverified     outcome = "unverified"
	outcomeTooOld         outcome = "too_old"
	outcomeCrashed        outcome = "crashed"
	outcomeWaiting        outcome = "waiting"
	outcomeDeadLetter     outcome = "dead_letter" // counted beside the failure
	outcomeIgnored        outcome = "not_for_us"
)

// telemetry counts attempts by their outcome. Attributes: the consumer, the
// topic if the message came through a router, and the kind of a failure.
type telemetry struct {
	consumer   attribute.KeyValue
	known      sync.Map // of attributes by label: making a set costs more than counting
	handled    metric.Int64Counter
	duplicates metric.Int64Counter
	failed     metric.Int64Counter
	dead       metric.Int64Counter
	ignored    metric.Int64Counter
}

func newTelemetry(provider metric.MeterProvider, consumer string) (*telemetry, error) {
	meter := provider.Meter("github.com/oncemill/oncemill/inbox")
	t := &telemetry{consumer: attribute.String("messaging.consumer.group.name", consumer)}
	var errs [5]error
	t.handled, errs[0] = meter.Int64Counter("oncemill.inbox.handled", metric.WithUnit("{message}"),
		metric.WithDescription("Messages whose effects were committed."))
	t.duplicates, errs[1] = meter.Int64Counter("oncemill.inbox.duplicates", metric.WithUnit("{message}"),
		metric.WithDescription("Deliveries that were acknowledged without running the handler."))
	t.failed, errs[2] = meter.Int64Counter("oncemill.inbox.failed", metric.WithUnit("{message}"),
		metric.WithDescription("Attempts that left nothing behind, or whose commit has an unknown outcome."))
	t.dead, errs[3] = meter.Int64Counter("oncemill.inbox.dead_letters", metric.WithUnit("{message}"),
		metric.WithDescription("Messages that became dead letters."))
	t.ignored, errs[4] = meter.Int64Counter("oncemill.inbox.ignored", metric.WithUnit("{message}"),
		metric.WithDescription("Replays for another consumer, acknowledged without running the handler."))
	return t, errors.Join(errs[:]...)
}

func (t *telemetry) record(ctx context.Context, result outcome) {
	counter, kind := t.failed, result
	switch result {
	case outcomeHandled:
		counter, kind = t.handled, ""
	case outcomeDuplicate:
		counter, kind = t.duplicates, ""
	case outcomeDeadLetter:
		counter, kind = t.dead, ""
	case outcomeIgnored:
		counter, kind = t.ignored, ""
	}
	counter.Add(ctx, 1, t.attributes(label{message.SubscribeTopicFromCtx(ctx), kind}))
}

// label distinguishes one count from another. There are few: topics are only those that
// somebody has subscribed to.
type label struct {
	topic string
	kind  outcome // of a failure
}

func (t *telemetry) attributes(l label) metric.AddOption {
	made, _ := t.known.Load(l)
	if option, ok := made.(metric.AddOption); ok {
		return option
	}
	attrs := []attribute.KeyValue{t.consumer}
	if l.topic != "" {
		attrs = append(attrs, attribute.String("messaging.destination.name", l.topic))
	}
	if l.kind != "" {
		attrs = append(attrs, attribute.String("error.type", string(l.kind)))
	}
	option := metric.WithAttributeSet(attribute.NewSet(attrs...))
	t.known.Store(l, option)
	return option
}
