package rabbitmq_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// Deliveries of a foreign producer, with an AMQP message id, numbers in the
// headers and a history of dead-lettering by RabbitMQ, reach an inbox through the
// stock subscriber, and each copy once.
func TestMarshaler_InTheStockSubscriber(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	db := testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "stock"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := amqp.NewDurableQueueConfig(uri)
	cfg.Marshaler = rabbitmq.Marshaler{}
	subscriber, err := amqp.NewSubscriber(cfg, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	handled := make(chan *message.Message, 10)
	var deliveries atomic.Int32
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			deliveries.Add(1)
			return h(msg)
		}
	})
	router.AddConsumerHandler("reserve", "orders", subscriber, func(msg *message.Message) error {
		handled <- msg
		return nil
	}).AddMiddleware(in.Middleware)
	stopped := make(chan error)
	go func() { stopped <- router.Run(t.Context()) }()
	<-router.Running()

	publishForeign(t, uri, 3)
	msg := message.NewMessage("none", nil)
	select {
	case msg = <-handled:
	case <-time.After(maxWait):
	}
	if msg.UUID != "order-1" || string(msg.Payload) != "payload" || msg.Metadata.Get("attempt") != "7" {
		t.Errorf("got %+v", msg)
	}
	if death := msg.Metadata.Get("x-death"); !strings.Contains(death, `"reason":"expired"`) {
		t.Errorf("x-death is %q", death)
	}
	eventually(t, "three deliveries", func() bool { return deliveries.Load() >= 3 })
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if n := len(handled); n != 0 {
		t.Errorf("%d of %d deliveries were handled again", n, deliveries.Load())
	}
}

// publishForeign publishes copies of one message to a queue whose messages expire
// into the queue "orders".
func publishForeign(t *testing.T, uri string, copies int) {
	t.Helper()
	conn, err := amqp091.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}()
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := channel.Confirm(false); err != nil {
		t.Fatal(err)
	}
	_, err = channel.QueueDeclare("waiting", true, false, false, false, amqp091.Table{
		"x-message-ttl": int32(10), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders",
	})
	if err != nil {
		t.Fatal(err)
	}
	for range copies {
		ctx, cancel := context.WithTimeout(t.Context(), maxWait)
		defer cancel()
		confirm, err := channel.PublishWithDeferredConfirm("", "waiting", false, false, amqp091.Publishing{
			MessageId: "order-1", Headers: amqp091.Table{"attempt": int32(7), "tags": []any{"a", int64(1)}}, Body: []byte("payload"),
		})
		if err != nil {
			t.Fatal(err)
		}
		if ok, err := confirm.WaitContext(ctx); !ok || err != nil {
			t.Fatalf("confirmed: %t, %v", ok, err)
		}
	}
}
