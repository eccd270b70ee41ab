package rabbitmq

import (
	"context"
	"log/slog"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
)

// A handler may return as its time ends. Which of the two a subscription notices first is chance.
// Here only the end of the time wakes it: the message is acknowledged all the same.
func TestDrain_AcknowledgesWhatEndsTogetherWithItsTime(t *testing.T) {
	t.Parallel()
	cfg := wamqp.NewDurableQueueConfig(testserver.RabbitMQ(t))
	s, err := New(cfg, Config{CloseTimeout: time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close() //nolint:errcheck // it returns none
	sub, err := s.begin("orders")
	if err != nil {
		t.Fatal(err)
	}
	defer s.end(sub)
	current, err := sub.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Publish("orders", message.NewMessage("a", nil)); err != nil {
		t.Fatal(err)
	}
	sub.accept(current, <-current.deliveries)
	p := sub.ready[0]
	p.prepare(t.Context(), s, "orders", nil)
	sub.handOut()
	sub.outcomes.wake = nil
	sub.outcomes.put(outcome{delivery: p, acked: true})
	ended, end := context.WithCancel(t.Context())
	end()
	sub.drain(ended, t.Context(), current)
	current.close() // what was not acknowledged is in the queue again
	err = s.onChannel(t.Context(), s.connector, func(_ *link, channel *amqp.Channel) error {
		again, found, err := channel.Get("orders", true)
		if found {
			t.Errorf("message %q comes again, although it was handled", again.MessageId)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
