package rabbitmq_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// Two consumers have a queue each. What one of them could not handle comes back to its
// queue alone.
func TestSubscriber_ReplayComesToTheQueueOfItsConsumer(t *testing.T) {
	t.Parallel()
	uri, pg := testserver.RabbitMQ(t), testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := pg.DB.ExecContext(t.Context(), `create table effects (message_id text)`); err != nil {
		t.Fatal(err)
	}
	letters, err := dlq.New(pg.DB, dlq.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	direct := wamqp.NewDurableQueueConfig(uri)
	direct.Marshaler, direct.Publish.ConfirmDelivery = rabbitmq.Marshaler{}, true
	toQueue, err := wamqp.NewPublisher(direct, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { toQueue.Close() })

	router := message.NewDefaultRouter(watermill.NopLogger{})
	var mended atomic.Bool
	deliveries := map[string]*atomic.Int32{"stock": {}, "mail": {}}
	inboxes := map[string]*inbox.Inbox{}
	for consumer, n := range deliveries {
		in, err := inbox.New(pg.DB, inbox.Config{
			Consumer: consumer, Database: pg.Config, DeadLetters: letters,
			Replays: &inbox.Replays{Publisher: toQueue, Topic: func(l *dlq.Letter) string { return l.Topic + "_" + consumer }},
		})
		if err != nil {
			t.Fatal(err)
		}
		inboxes[consumer] = in
		fanout := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix(consumer))
		router.AddConsumerHandler(consumer, "orders", subscriber(t, fanout, rabbitmq.Config{}), func(msg *message.Message) error {
			if consumer == "stock" && !mended.Load() {
				return inbox.Permanent(errors.New("no such article"))
			}
			return addEffect(msg)
		}).AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				n.Add(1)
				return h(msg)
			}
		}, in.Middleware)
	}
	stopped := make(chan error)
	go func() { stopped <- router.Run(context.WithoutCancel(t.Context())) }()
	<-router.Running()

	fanout := wamqp.NewDurablePubSubConfig(uri, nil)
	fanout.Marshaler = rabbitmq.Marshaler{}
	producer, err := wamqp.NewPublisher(fanout, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { producer.Close() })
	if err := producer.Publish("orders", message.NewMessage("order 1", []byte("payload"))); err != nil {
		t.Fatal(err)
	}
	list := func(f dlq.Filter) []*dlq.Letter {
		found, err := letters.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	eventually(t, "a letter of stock", func() bool { return len(list(dlq.Filter{})) == 1 && deliveries["mail"].Load() == 1 })
	mended.Store(true)
	if _, err := letters.Replay(t.Context(), []int64{list(dlq.Filter{})[0].ID}, dlq.Act{By: "ada"}); err != nil {
		t.Fatal(err)
	}
	// Both run: mail has nothing to replay.
	for _, consumer := range []string{"mail", "stock"} {
		if _, err := inboxes[consumer].Replay(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	count := func() (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), `select count(*) from effects where message_id = 'order 1'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "the effect of stock", func() bool { return count() == 2 })
	if closed := list(dlq.Filter{States: []dlq.State{dlq.StateReplayed}}); len(closed) != 1 {
		t.Errorf("%d letters are replayed", len(closed))
	}
	if err := errors.Join(router.Close(), <-stopped); err != nil {
		t.Error(err)
	}
	if s, m := deliveries["stock"].Load(), deliveries["mail"].Load(); s != 2 || m != 1 {
		t.Errorf("%d deliveries to stock and %d to mail, want 2 and 1", s, m)
	}
}

// RabbitMQ confirms what it has no queue for. The letter stays: only handling the message
// ends its replay.
func TestSubscriber_ReplayToNoQueueLosesNothing(t *testing.T) {
	t.Parallel()
	uri, pg := testserver.RabbitMQ(t), testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	letters, err := dlq.New(pg.DB, dlq.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	direct := wamqp.NewDurableQueueConfig(uri)
	direct.Marshaler, direct.Publish.ConfirmDelivery = rabbitmq.Marshaler{}, true
	toQueue, err := wamqp.NewPublisher(direct, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { toQueue.Close() })
	in, err := inbox.New(pg.DB, inbox.Config{
		Consumer: "stock", Database: pg.Config, DeadLetters: letters,
		Replays: &inbox.Replays{Publisher: toQueue, Topic: func(*dlq.Letter) string { return "nowhere" }},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := in.Refuse(t.Context(), message.NewMessage("a", []byte("x")), errors.New("no such encoding")); err != nil {
		t.Fatal(err)
	}
	list, err := letters.List(t.Context(), dlq.Filter{})
	if err != nil || len(list) != 1 {
		t.Fatalf("%d letters, %v", len(list), err)
	}
	if _, err := letters.Replay(t.Context(), []int64{list[0].ID}, dlq.Act{By: "ada"}); err != nil {
		t.Fatal(err)
	}
	if n, err := in.Replay(t.Context()); n != 1 || err != nil {
		t.Errorf("%d published, %v", n, err)
	}
	if list, err = letters.List(t.Context(), dlq.Filter{}); err != nil || list[0].State != dlq.StateReplaying {
		t.Errorf("the letter is %+v, %v", list[0], err)
	}
}
