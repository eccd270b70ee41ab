package rabbitmq_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

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

// A queue may be configured to refuse what is too much for it.
func TestSubscriber_PublishFailsWhereTheQueueIsFull(t *testing.T) {
	t.Parallel()
	cfg := queues(testserver.RabbitMQ(t), 1)
	cfg.Queue.Arguments = amqp091.Table{"x-max-length": int32(1), "x-overflow": "reject-publish"}
	s := subscriber(t, cfg, rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	var held *message.Message
	for _, id := range []string{"is handled", "waits"} {
		if err := s.Publish("orders", message.NewMessage(id, nil)); err != nil {
			t.Fatal(err)
		}
		if held == nil {
			held = next(t, out)
		}
	}
	if err := s.Publish("orders", message.NewMessage("too much", nil)); err == nil || !strings.Contains(err.Error(), "not confirmed") {
		t.Errorf("to a full queue: %v", err)
	}
	held.Ack()
	next(t, out).Ack()
	none(t, out)
}

// The name of a queue may be made anew for each subscription.
func TestSubscriber_PublishesToTheQueueItConsumesFrom(t *testing.T) {
	t.Parallel()
	cfg, n := queues(testserver.RabbitMQ(t), 1), 0
	cfg.Queue.GenerateName = func(topic string) string { n++; return fmt.Sprint(topic, n) }
	s := subscriber(t, cfg, rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	if err := s.Publish("orders", message.NewMessage("order 1", nil)); err != nil {
		t.Error(err)
	}
	next(t, out).Ack()
}

// Each of these would cost the connection, or a copy would go elsewhere.
func TestSubscriber_PublishRefusesWhatCannotBeSent(t *testing.T) {
	t.Parallel()
	s := subscriber(t, queues(testserver.RabbitMQ(t), 1), rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	with := func(name, value string) *message.Message {
		msg := message.NewMessage("order 1", nil)
		msg.Metadata.Set(name, value)
		return msg
	}
	for name, msg := range map[string]*message.Message{
		"a long name": with(strings.Repeat("n", 256), ""), "a large value": with("n", strings.Repeat("v", 200_000)),
	} {
		if err := s.Publish("orders", msg); err == nil || !strings.Contains(err.Error(), "headers") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"CC", "BCC"} {
		if err := s.Publish("orders", with(name, "elsewhere")); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		next(t, out).Ack()
	}
}

// Nobody waits for a broker that says nothing, when the subscriber is closed.
func TestSubscriber_CloseEndsAPublish(t *testing.T) {
	t.Parallel()
	proxy, uri := testserver.ProxyAMQP(t, testserver.RabbitMQ(t))
	s := subscriber(t, queues(uri, 1), rabbitmq.Config{CallTimeout: time.Hour})
	subscribe(t, s, "orders")
	if err := s.Publish("orders", message.NewMessage("order 1", nil)); err != nil {
		t.Fatal(err)
	}
	proxy.DropAcks.Store(true)
	published := make(chan error, 1)
	go func() { published <- s.Publish("orders", message.NewMessage("order 2", nil)) }()
	a := newAdmin(t, uri)
	eventually(t, "it has been sent", func() bool {
		q, err := a.ch.QueueDeclarePassive("orders", true, false, false, false, nil)
		return err == nil && q.Messages > 0
	})
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-published; !errors.Is(err, rabbitmq.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
