package inbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/outbox"
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
	duration   metric.Float64Histogram
	toEffect   metric.Float64Histogram
	happened   happened
}

func newTelemetry(provider metric.MeterProvider, guard *nopanic.Telemetry, consumer string) (*telemetry, error) {
	meter := provider.Meter("github.com/oncemill/oncemill/inbox")
	t := &telemetry{consumer: attribute.String("messaging.consumer.group.name", consumer)}
	var errs [7]error
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
	t.duration, errs[5] = meter.Float64Histogram("messaging.process.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from a delivery to its acknowledgement or nack, with attempts in between."), metric.WithExplicitBucketBoundaries(durationBounds...))
	t.toEffect, errs[6] = meter.Float64Histogram("oncemill.inbox.commit_to_effect", metric.WithUnit("s"),
		metric.WithDescription("Time from the insert into the outbox, by its database's clock, to the commit of the effects, by the clock of this process."),
		metric.WithExplicitBucketBoundaries(append(durationBounds[:len(durationBounds):len(durationBounds)], 30, 60, 300, 1800, 3600, 21600, 86400)...))
	for _, c := range []*metric.Int64Counter{&t.handled, &t.duplicates, &t.failed, &t.dead, &t.ignored} {
		*c = guard.Counter(*c)
	}
	t.duration, t.toEffect = guard.Histogram(t.duration), guard.Histogram(t.toEffect)
	return t, errors.Join(errs[:]...)
}

func (t *telemetry) record(ctx context.Context, w *work, result outcome) {
	t.happened.add(result)
	if result == outcomeDeadLetter {
		w.dead = true
	} else {
		w.last = result
	}
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
	counter.Add(ctx, 1, t.attributes(label{topic: message.SubscribeTopicFromCtx(ctx), kind: kind}))
}

// label distinguishes one count from another. There are few: topics are only those that
// somebody has subscribed to.
type label struct {
	topic string
	kind  outcome // of a failure
	ended string  // how a delivery ended; empty for a counter
}

func (t *telemetry) attributes(l label) metric.MeasurementOption {
	made, _ := t.known.Load(l)
	if option, ok := made.(metric.MeasurementOption); ok {
		return option
	}
	attrs := []attribute.KeyValue{t.consumer}
	if l.topic != "" {
		attrs = append(attrs, attribute.String("messaging.destination.name", l.topic))
	}
	if l.ended != "" {
		attrs = append(attrs, attribute.String("messaging.system", "oncemill"), attribute.String("messaging.operation.name", "process"),
			attribute.String("messaging.operation.type", "process"), attribute.String("outcome", l.ended))
	}
	if l.kind != "" {
		attrs = append(attrs, attribute.String("error.type", string(l.kind)))
	}
	option := metric.WithAttributeSet(attribute.NewSet(attrs...))
	t.known.Store(l, option)
	return option
}

// durationBounds are those that the semantic conventions recommend, in seconds.
var durationBounds = []float64{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}

// measure records how long a delivery took, and how long after the insert into the outbox
// its effects were committed. A replay of a dead letter is late because of an operator.
func (t *telemetry) measure(ctx context.Context, w *work, began time.Time, err error) {
	topic := message.SubscribeTopicFromCtx(ctx)
	if t.duration.Enabled(ctx) {
		l := label{topic: topic, ended: w.ended(err)}
		if err != nil || w.dead {
			l.kind = w.kind(err)
		}
		t.duration.Record(ctx, time.Since(began).Seconds(), t.attributes(l))
	}
	if w.last != outcomeHandled || err != nil || w.replay != nil || !t.toEffect.Enabled(ctx) {
		return
	}
	if created := createdAt(ctx, w); !created.IsZero() {
		if took := time.Since(created); -skewMost < took && took < wayMost {
			// Clocks of two machines differ: no effect is before its message.
			t.toEffect.Record(ctx, max(0, took.Seconds()), t.attributes(label{topic: topic}))
		}
	}
}

// Anybody who can write to the broker can choose the time of a message.
const (
	skewMost = time.Minute
	wayMost  = 366 * 24 * time.Hour
)

// createdAt returns the time of the insert, zero if the message did not come by a relay. The
// subscriber may know it by the second only. Where the two disagree, the metadata is that of
// an incoming message, which a consumer and a relay of an older build have passed on.
func createdAt(ctx context.Context, w *work) (at time.Time) {
	if d, ok := DeliveryFromContext(ctx); ok {
		at = d.CreatedAt()
	}
	value := w.came().metadata[outbox.CreatedAtMetadata]
	if value == "" || len(value) > len(time.RFC3339Nano) {
		return at
	}
	sent, err := time.Parse(time.RFC3339Nano, value)
	if err == nil && (at.IsZero() || at.Unix() == sent.Unix()) {
		return sent
	}
	return at
}

// ended names how a delivery ended, for metrics and spans.
func (w *work) ended(err error) string {
	switch {
	case err != nil:
		return "failed"
	case w.dead:
		return string(outcomeDeadLetter)
	case w.last == "":
		return string(outcomeIgnored)
	}
	return string(w.last)
}

// kind is the error.type of a delivery that failed or became a dead letter.
func (w *work) kind(err error) outcome {
	switch {
	case err == errGoexit: //nolint:errorlint // never wrapped
		return outcomeHandlerFailed
	case w.last == "": // its records could not be read or written
		return outcomeDatabaseFailed
	}
	return w.last
}
