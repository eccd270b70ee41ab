package work

import (
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func (w *worker) configureRelay(cfg *mill.Config) (err error) {
	cfg.Outbox = &outbox.Config{}
	cfg.Relay.Name, cfg.Relay.Lease = w.Name, w.Lease
	cfg.Sink, err = rabbitmq.New(amqp.NewDurablePubSubConfig(w.AMQP, nil), rabbitmq.Config{
		Logger: w.log, ConfirmTimeout: 4 * w.Lease,
	})
	return err
}
