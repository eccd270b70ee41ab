package rabbitmq_test

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
)

func ExampleNew() {
	// consume handles orders until ctx ends.
	consume := func(ctx context.Context, db *sql.DB, letters *dlq.Store) error {
		in, err := inbox.New(db, inbox.Config{Consumer: "stock", DeadLetters: letters})
		if err != nil {
			return err
		}
		cfg := wamqp.NewDurablePubSubConfig("amqps://app@rabbitmq.example.com/", wamqp.GenerateQueueNameTopicNameWithSuffix("stock"))
		cfg.Consume.Qos.PrefetchCount = 200
		subscriber, err := rabbitmq.New(cfg, rabbitmq.Config{Malformed: in.Refuse})
		if err != nil {
			return err
		}
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		router.AddConsumerHandler("reserve", "orders", subscriber, reserve).AddMiddleware(in.GroupMiddleware)
		return router.Run(ctx)
	}
	_ = consume
}

func reserve(msg *message.Message) error {
	tx, _ := inbox.TxFromContext(msg.Context())
	_, err := tx.ExecContext(msg.Context(), `update stock set reserved = reserved + 1 where item = $1`, string(msg.Payload))
	return err
}
