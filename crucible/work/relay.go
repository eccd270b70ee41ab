package work

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func (w *worker) configureRelay(cfg *mill.Config) (err error) {
	cfg.Outbox = &outbox.Config{}
	cfg.Relay.Name, cfg.Relay.Lease, cfg.Relay.UniqueName = w.Name, w.Lease, w.named()
	cfg.Relay.Retry = relay.Retry{MaxAttempts: 4, Initial: 200 * time.Millisecond, Max: 500 * time.Millisecond}
	sink, err := rabbitmq.New(w.broker(nil), rabbitmq.Config{Addresses: w.MoreAMQP, Logger: w.log, ConfirmTimeout: 4 * w.Lease})
	cfg.Sink = &choosy{sink}
	return err
}

// choosy is a sink that refuses messages in the mood for it, most of the time. RabbitMQ has
// no refusal of one message that a retry gets past.
type choosy struct{ *rabbitmq.Sink }

var errChoosy = errors.New("the sink is choosy")

func (c *choosy) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	taken := make([]*relay.Message, 0, len(msgs))
	for _, m := range msgs {
		if m.Metadata.Get(metaMood) == MoodRefused && rand.Float64() < 0.7 {
			done(m, relay.Refused(errChoosy))
			continue
		}
		taken = append(taken, m)
	}
	if len(taken) > 0 {
		c.Sink.Publish(ctx, taken, done)
	}
}

// broker returns the configuration of the connection to RabbitMQ. A relay whose connection falls
// silent keeps its lanes until it notices, after three heartbeats. So these have to fit the
// lease, which is short here.
func (w *worker) broker(queue amqp.QueueNameGenerator) amqp.Config {
	config := amqp.NewDurablePubSubConfig(w.AMQP, queue)
	config.Connection.AmqpConfig = &amqp091.Config{Heartbeat: time.Second, Locale: "en_US"}
	return config
}
