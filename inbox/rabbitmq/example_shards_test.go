package rabbitmq_test

import (
	"context"
	"database/sql"
	"errors"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/mill"
)

func ExampleShards() {
	// serve handles orders until ctx ends, together with other processes.
	serve := func(ctx context.Context, db *sql.DB, broker string, reserve message.HandlerFunc) error {
		//snippet:shards
		shards := rabbitmq.Shards{Count: 8}
		m, err := mill.New(db, mill.Config{
			Consumers: []mill.Consumer{{
				Name:       "stock",
				Topic:      "orders",
				Subscriber: rabbitmq.Queue(broker, "stock", rabbitmq.Config{Shards: shards}),
				Handler:    reserve,
			}},
		})
		//snippet:end
		if err != nil {
			return err
		}
		return m.Run(ctx)
	}
	_ = serve
}

func ExampleSubscriber_MoveShards() {
	//snippet:move
	// moveShards leads orders from 8 shards to 16. All processes of the consumer run with these
	// Shards already.
	moveShards := func(ctx context.Context, broker string) error {
		queue := wamqp.NewDurablePubSubConfig(broker, wamqp.GenerateQueueNameTopicNameWithSuffix("stock"))
		queue.Consume.Qos.PrefetchCount = 32
		subscriber, err := rabbitmq.New(queue, rabbitmq.Config{
			Shards: rabbitmq.Shards{Count: 16, Previous: 8},
		})
		if err != nil {
			return err
		}
		return errors.Join(subscriber.MoveShards(ctx, "orders"), subscriber.Close())
	}
	//snippet:end
	_ = moveShards
}
