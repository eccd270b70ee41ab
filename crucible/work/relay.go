package work

import (
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func (w *worker) configureRelay(cfg *mill.Config) (err error) {
	cfg.Outbox = &outbox.Config{}
	cfg.Relay.Name, cfg.Relay.Lease = w.Name, w.Lease
	cfg.Sink, err = rabbitmq.New(w.broker(nil), rabbitmq.Config{Logger: w.log, ConfirmTimeout: 4 * w.Lease})
	return err
}

// broker returns the configuration of the connection to RabbitMQ. A relay whose connection falls
// silent keeps its lanes until it notices, after three heartbeats. So these have to fit the
// lease, which is short here.
func (w *worker) broker(queue amqp.QueueNameGenerator) amqp.Config {
	config := amqp.NewDurablePubSubConfig(w.AMQP, queue)
	config.Connection.AmqpConfig = &amqp091.Config{Heartbeat: time.Second, Locale: "en_US"}
	return config
}
