package rabbitmq

import (
	"errors"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
)

// queuePrefetch is how many messages of a [Queue] may be in flight.
const queuePrefetch = 32

// Queue returns a function that makes the subscriber of a consumer's durable queue, for
// mill.Consumer.Subscriber. The queue is named topic_consumer and is bound to the fanout
// exchange of its topic, as by watermill-amqp's NewDurablePubSubConfig with
// GenerateQueueNameTopicNameWithSuffix. Use the consumer's name: if two consumers use one
// queue, each message reaches only one of them. Up to 32 messages are in flight, one of each
// ordering key. Deliveries that cannot be read become dead letters, unless cfg.Malformed
// is set. With cfg.Shards, the messages are divided among several such queues. For other queues
// use [New].
func Queue(uri, consumer string, cfg Config) func(in *inbox.Inbox) (message.Subscriber, error) {
	return func(in *inbox.Inbox) (message.Subscriber, error) {
		queue := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix(consumer))
		queue.Consume.Qos.PrefetchCount = queuePrefetch
		own := cfg
		if own.Malformed == nil {
			own.Malformed = in.Refuse
		}
		subscriber, err := New(queue, own)
		if consumer == "" {
			missing := &oncemill.ConfigError{Field: "rabbitmq.Queue consumer", Value: `""`, Problem: "is required; use the name of the consumer"}
			return nil, errors.Join(missing, err)
		}
		return subscriber, err
	}
}
