package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/steer"
)

// A delivery that is held past AckTimeout goes back to the queue and comes again, in order.
func TestSubscriber_APausedConsumerHandlesNothingAndGoesOnInOrder(t *testing.T) {
	t.Parallel()
	uri, pg := testserver.RabbitMQ(t), testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations, audit.Migrations, steer.Migrations); err != nil {
		t.Fatal(err)
	}
	control, err := steer.New(pg.DB, steer.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	target, act := steer.Target{Kind: steer.Consumer, Name: "stock"}, steer.Act{By: "ada", Reason: "a test"}
	if err := control.Pause(t.Context(), target, act); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pg.DB, inbox.Config{Consumer: "stock", Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var handled []string
	queue := wamqp.NewDurableQueueConfig(uri)
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("stock", "orders", subscriber(t, queue, rabbitmq.Config{AckTimeout: 2 * time.Second}), func(msg *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		handled = append(handled, msg.UUID)
		return nil
	}).AddMiddleware(in.Middleware)
	stopped := make(chan error)
	go func() { stopped <- router.Run(context.WithoutCancel(t.Context())) }()
	<-router.Running()
	queue.Marshaler = rabbitmq.Marshaler{}
	producer, err := wamqp.NewPublisher(queue, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { producer.Close() })
	var want []string
	for i := range 40 {
		msg := message.NewMessage(fmt.Sprint("m", i), nil)
		outbox.SetKey(msg, "k")
		want = append(want, msg.UUID)
		if err := producer.Publish("orders", msg); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(6 * time.Second)
	mu.Lock()
	if len(handled) > 0 {
		t.Errorf("%d handled while paused", len(handled))
	}
	mu.Unlock()
	if err := control.Resume(t.Context(), target, act); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "all are handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(handled) >= len(want)
	})
	if err := errors.Join(router.Close(), <-stopped); err != nil {
		t.Error(err)
	}
	if !slices.Equal(handled, want) {
		t.Errorf("handled %q", handled)
	}
}

// What is held for a paused consumer keeps no process from its end, and is not lost.
func TestSubscriber_GivesBackWhatIsHeldWhenItStops(t *testing.T) {
	t.Parallel()
	uri, pg := testserver.RabbitMQ(t), testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations, audit.Migrations, steer.Migrations); err != nil {
		t.Fatal(err)
	}
	control, err := steer.New(pg.DB, steer.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	target, act := steer.Target{Kind: steer.Consumer, Name: "stock"}, steer.Act{By: "ada", Reason: "a test"}
	if err := control.Pause(t.Context(), target, act); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pg.DB, inbox.Config{Consumer: "stock", Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	queue := wamqp.NewDurableQueueConfig(uri)
	var mu sync.Mutex
	var handled []string
	var held atomic.Int32
	run := func() (stop func() error) {
		router := message.NewDefaultRouter(watermill.NopLogger{})
		router.AddConsumerHandler("stock", "orders", subscriber(t, queue, rabbitmq.Config{CloseTimeout: time.Minute}), func(msg *message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			handled = append(handled, msg.UUID)
			return nil
		}).AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				held.Add(1)
				return h(msg)
			}
		}, in.Middleware)
		ended := make(chan error)
		go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
		<-router.Running()
		return func() error { return errors.Join(router.Close(), <-ended) }
	}
	stop := run()
	queue.Marshaler = rabbitmq.Marshaler{}
	producer, err := wamqp.NewPublisher(queue, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { producer.Close() })
	var want []string
	for i := range 10 {
		msg := message.NewMessage(fmt.Sprint("m", i), nil)
		outbox.SetKey(msg, "k")
		want = append(want, msg.UUID)
		if err := producer.Publish("orders", msg); err != nil {
			t.Fatal(err)
		}
	}
	testserver.Eventually(t, "one is held", func() bool { return held.Load() > 0 })
	began := time.Now()
	if err := stop(); err != nil || time.Since(began) > 10*time.Second {
		t.Errorf("it ended after %v: %v", time.Since(began), err)
	}
	if err := control.Resume(t.Context(), target, act); err != nil {
		t.Fatal(err)
	}
	stop = run()
	testserver.Eventually(t, "all are handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(handled) >= len(want)
	})
	if err := stop(); err != nil || !slices.Equal(handled, want) {
		t.Errorf("handled %q, %v", handled, err)
	}
}
