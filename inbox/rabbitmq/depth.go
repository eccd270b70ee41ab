package rabbitmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/gauges"
	"github.com/oncemill/oncemill/internal/labels"
	"github.com/oncemill/oncemill/internal/repeats"
)

// depths asks the broker how many messages wait in the queues that a subscriber consumes from. It
// has a connection of its own: a queue that does not answer costs the connection.
type depths struct {
	*gauges.Reader[[]queueDepth]
	asking       *connector
	registration metric.Registration
}

type queueDepth struct {
	topic, queue string
	messages     int64
}

// askLimit bounds connecting, and each request. Close waits for one.
const askLimit = 2 * time.Second

func newDepths(s *settings) (*depths, error) {
	hasty := *s
	hasty.CallTimeout = min(s.CallTimeout, askLimit)
	d := &depths{Reader: gauges.New[[]queueDepth](), asking: newConnector(&hasty)}
	meter := s.MeterProvider.Meter("github.com/oncemill/oncemill/inbox/rabbitmq")
	gauge, err := meter.Int64ObservableGauge("oncemill.inbox.queue_depth", metric.WithUnit("{message}"),
		metric.WithDescription("Messages that wait in a queue for a consumer. Every process that consumes from the queue reports it."))
	if err != nil {
		return nil, fmt.Errorf("rabbitmq: make a gauge: %w", err)
	}
	d.registration, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		found, _ := d.Collect()
		for _, q := range found {
			o.ObserveInt64(gauge, q.messages, metric.WithAttributes(
				attribute.String("messaging.destination.name", q.topic), attribute.String("messaging.destination.subscription.name", q.queue)))
		}
		return nil
	}, gauge)
	if err != nil {
		return nil, fmt.Errorf("rabbitmq: register a gauge: %w", err)
	}
	return d, nil
}

// measure reads the depths until the subscriber is closed.
func (s *Subscriber) measure() {
	ctx := untilClosed{s.closing}
	var failures repeats.Series
	log := s.settings.Logger
	s.depths.Run(ctx, s.readDepths, func(err error) {
		if err != nil {
			level, attrs := failures.Failed(slog.LevelWarn, err.Error())
			log.Log(ctx, level, "the queues cannot be measured; their metrics are missing until they can", append(attrs, "error", err)...)
		} else if attrs, report := failures.Over(); report {
			log.InfoContext(ctx, "the queues are measured again", attrs...)
		}
	})
}

func (s *Subscriber) readDepths(ctx context.Context) (found []queueDepth, ok bool, err error) {
	for _, q := range s.consumed() {
		err := s.askDepth(ctx, &q)
		var refused *amqp.Error
		switch {
		case err == nil:
			found = append(found, q)
		case errors.As(err, &refused) && refused.Code == amqp.NotFound: // removed
		default:
			return nil, false, fmt.Errorf("ask for the depth of queue %q: %w", q.queue, err)
		}
	}
	return found, len(found) > 0, nil
}

// consumed returns the queues of the subscriptions, as many as a metric may have series. A queue
// that is exclusive to the connection of its consumer answers no other.
func (s *Subscriber) consumed() (queues []queueDepth) {
	if s.settings.topology.Queue.Exclusive {
		return nil
	}
	s.mu.Lock()
	for sub := range s.current {
		queues = append(queues, queueDepth{topic: sub.topic, queue: sub.queue})
	}
	s.mu.Unlock()
	slices.SortFunc(queues, func(a, b queueDepth) int { return cmp.Compare(a.queue, b.queue) })
	queues = slices.CompactFunc(queues, func(a, b queueDepth) bool { return a.queue == b.queue })
	return queues[:min(len(queues), labels.Most)]
}

func (s *Subscriber) askDepth(ctx context.Context, q *queueDepth) error {
	limited, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	return s.onChannel(limited, s.depths.asking, func(_ *link, channel *amqp.Channel) error {
		// A passive declaration asks for the queue by its name alone.
		state, err := channel.QueueDeclarePassive(q.queue, durable, false, false, noWait, nil)
		q.messages = int64(state.Messages)
		return err
	})
}
