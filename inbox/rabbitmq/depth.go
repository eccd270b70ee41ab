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

// mostSilent is how many queues may fail to answer before a reading ends.
const mostSilent = 3

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

// readDepths returns the depths that are known, beside an error: a queue that does not answer
// costs the connection, but not the depths of the others.
func (s *Subscriber) readDepths(ctx context.Context) (found []queueDepth, ok bool, err error) {
	var failed []error
	for left := s.consumed(); len(left) > 0 && len(failed) < mostSilent && ctx.Err() == nil; {
		asked, answered, err := s.askDepths(ctx, left)
		left, found = left[asked:], append(found, answered...)
		var refused *amqp.Error
		switch {
		case err == nil:
		case errors.As(err, &refused) && refused.Code == amqp.NotFound: // removed
		case asked == 0: // there is no connection
			return found, len(found) > 0, errors.Join(append(failed, err)...)
		default:
			failed = append(failed, err)
		}
	}
	return found, len(found) > 0, errors.Join(failed...)
}

// consumed returns the queues of the subscriptions, as many as a metric may have series. A queue
// that is exclusive to the connection of its consumer answers no other, and one whose name the
// broker chooses is known to the channel of its consumer only.
func (s *Subscriber) consumed() (queues []queueDepth) {
	if s.settings.topology.Queue.Exclusive {
		return nil
	}
	s.mu.Lock()
	for sub := range s.current {
		if sub.queue != "" {
			queues = append(queues, queueDepth{topic: sub.topic, queue: sub.queue})
		}
	}
	s.mu.Unlock()
	slices.SortFunc(queues, func(a, b queueDepth) int { return cmp.Or(cmp.Compare(a.queue, b.queue), cmp.Compare(a.topic, b.topic)) })
	queues = slices.CompactFunc(queues, func(a, b queueDepth) bool { return a.queue == b.queue })
	return queues[:min(len(queues), labels.Most)]
}

// askDepths asks for queues on one channel, for a part of the limit of a request. It returns how
// many it has asked for.
func (s *Subscriber) askDepths(ctx context.Context, queues []queueDepth) (asked int, found []queueDepth, err error) {
	limited, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	err = s.onChannel(limited, s.depths.asking, func(l *link, channel *amqp.Channel) error {
		end := time.Now().Add(l.settings.CallTimeout / 4)
		for asked < len(queues) && time.Now().Before(end) {
			q := queues[asked]
			asked++
			// A passive declaration asks for the queue by its name alone.
			state, err := channel.QueueDeclarePassive(q.queue, durable, false, false, noWait, nil)
			if err != nil {
				return fmt.Errorf("ask for the depth of queue %q: %w", q.queue, err)
			}
			// A quorum queue without a leader is answered for with zeros, whatever waits in it.
			if state.Messages > 0 || state.Consumers > 0 {
				q.messages = int64(state.Messages)
				found = append(found, q)
			}
		}
		return nil
	})
	return asked, found, err
}
