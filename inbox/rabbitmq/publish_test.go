package rabbitmq_test

import (
	"errors"
	"strings"
	"testing"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// What is published through the subscriber of one consumer does not reach the other ones of
// the topic, and has everything that it had when it came.
func TestSubscriber_PublishesToItsOwnQueue(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	fanout := func(consumer string) *rabbitmq.Subscriber {
		return subscriber(t, wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix(consumer)), rabbitmq.Config{})
	}
	stock, mail := fanout("stock"), fanout("mail")
	forStock, forMail := subscribe(t, stock, "orders"), subscribe(t, mail, "orders")
	first, second := message.NewMessage("order 1", []byte("one")), message.NewMessage("order 2", []byte("two"))
	first.Metadata.Set("oncemill_key", "ada")
	if err := stock.Publish("orders", first, second); err != nil {
		t.Fatal(err)
	}
	got := next(t, forStock)
	if got.UUID != "order 1" || string(got.Payload) != "one" || got.Metadata.Get("oncemill_key") != "ada" {
		t.Errorf("got %q, %q, %v", got.UUID, got.Payload, got.Metadata)
	}
	got.Ack()
	next(t, forStock).Ack()
	none(t, forMail)
}

// Confirmed would mean kept, and a queue that does not exist keeps nothing.
func TestSubscriber_PublishFailsWithoutAQueue(t *testing.T) {
	t.Parallel()
	s := subscriber(t, queues(testserver.RabbitMQ(t), 1), rabbitmq.Config{})
	msg := message.NewMessage("order 1", nil)
	if err := s.Publish("nowhere", msg); err == nil || !strings.Contains(err.Error(), "no such queue") {
		t.Errorf("without a queue: %v", err)
	}
	out := subscribe(t, s, "somewhere")
	if err := s.Publish("somewhere", msg); err != nil { // an error is no obstacle to the next call
		t.Error(err)
	}
	next(t, out).Ack()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Publish("somewhere", msg); !errors.Is(err, rabbitmq.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
