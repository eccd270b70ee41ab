package rabbitmq

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
)

// A subscription that ends waits for what it has given back. It ends as any other if Config.Key ends the goroutine then.
func TestSubscription_EndsThoughAKeyEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg := wamqp.NewDurableQueueConfig("amqp://guest:guest@localhost/")
		cfg.Queue.Arguments = amqp.Table{singleActiveArgument: true}
		settings, err := resolve(cfg, Config{})
		if err != nil {
			t.Fatal(err)
		}
		settings.Key = func(*message.Message) string {
			runtime.Goexit()
			return ""
		}
		s := newSubscription(&Subscriber{settings: settings, closing: make(chan struct{})}, "orders", "orders", "")
		s.lanes["key k"] = &lane{name: "key k", awaited: []position{{id: "exits"}}, until: time.Now().Add(time.Hour)}
		deliveries := make(chan amqp.Delivery)
		o := &session{next: 1, early: map[uint64]amqp.Delivery{}, deliveries: deliveries, acks: acks{prefetch: 10}}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		ended, returned := make(chan struct{}), false
		go func() {
			defer close(ended)
			s.run(ctx, o)
			returned = true
		}()
		synctest.Wait() // it has closed its output, and waits
		deliveries <- amqp.Delivery{DeliveryTag: 1, MessageId: "exits"}
		<-ended
		if !returned {
			t.Error("it did not end properly")
		}
	})
}
