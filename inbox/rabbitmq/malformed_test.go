package rabbitmq_test

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/internal/testserver"
)

// unreadable is a message that the marshaler is not even asked about.
func unreadable(id string) amqp091.Publishing {
	p := publishing(id, "")
	p.Headers = amqp091.Table{amqpconn.UnreadableHeader: "sent by a stranger"}
	return p
}

// hanging returns a Config.Malformed that does not return until it is released.
func hanging() (malformed func(context.Context, *message.Message, error) error, called <-chan string, release func()) {
	ids, released := make(chan string, 10), make(chan struct{})
	return func(_ context.Context, msg *message.Message, _ error) error {
		ids <- msg.UUID
		<-released
		return nil // when nobody waits for it
	}, ids, func() { close(released) }
}

// A Malformed that does not return keeps no subscriber from closing, and its message stays.
func TestSubscriber_ClosesBesideAMalformedThatHangs(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	a.declare("orders", nil)
	a.publish("orders", unreadable("hangs"))
	malformed, called, release := hanging()
	defer release()
	s := subscriber(t, queues(uri, 10), rabbitmq.Config{Malformed: malformed})
	subscribe(t, s, "orders")
	<-called
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	var err error
	eventually(t, "the subscriber is closed", func() bool {
		select {
		case err = <-closed:
			return true
		default:
			return false
		}
	})
	if err != nil {
		t.Error(err)
	}
	if n, redelivered := a.left("orders"); n != 1 || !redelivered["hangs"] {
		t.Errorf("%d are left in the queue: %v", n, redelivered)
	}
}

// With shards, it keeps no shard from the next process.
func TestShards_AreHandedOverBesideAMalformedThatHangs(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	const count = 2
	malformed, called, release := hanging()
	defer release()
	first := shards(count, 0)
	first.Malformed, first.AckTimeout = malformed, time.Second
	subscribe(t, subscriber(t, fanout(uri, 10), first), "orders")
	for i := range count {
		a.publish(shardName(count, i), unreadable("hangs"))
		<-called
	}
	second, moved := shards(count, 0), make(chan string, 10)
	second.Malformed = func(_ context.Context, msg *message.Message, _ error) error {
		moved <- msg.UUID
		return nil
	}
	subscribe(t, subscriber(t, fanout(uri, 10), second), "orders")
	eventually(t, "a shard is handed over", func() bool { return len(moved) > 0 })
}

// A Malformed that ends its goroutine has failed.
func TestSubscriber_AMalformedThatEndsItsGoroutineIsCalledAgain(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	a.declare("orders", nil)
	var calls atomic.Int32
	s := subscriber(t, queues(uri, 1), rabbitmq.Config{Malformed: func(context.Context, *message.Message, error) error {
		if calls.Add(1) < 3 {
			runtime.Goexit()
		}
		return nil
	}})
	out := subscribe(t, s, "orders")
	a.publish("orders", unreadable("ends"), publishing("after", ""))
	if msg := next(t, out); msg.UUID != "after" || !msg.Ack() {
		t.Errorf("got %q", msg.UUID)
	}
	eventually(t, "it is called three times", func() bool { return calls.Load() == 3 })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := a.left("orders"); left != 0 {
		t.Errorf("%d are left in the queue", left)
	}
}

// exiting is a marshaler that ends its goroutine.
type exiting struct{ rabbitmq.Marshaler }

func (m exiting) Unmarshal(d amqp091.Delivery) (*message.Message, error) {
	if d.MessageId == "exits" {
		runtime.Goexit()
	}
	return m.Marshaler.Unmarshal(d)
}

// A delivery whose marshaler or Key ends the goroutine cannot be read, and keeps no other.
func TestSubscriber_AReaderThatEndsItsGoroutineStopsNothing(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	key := func(msg *message.Message) string {
		if msg.UUID == "exits" {
			runtime.Goexit()
		}
		return msg.Metadata.Get(rabbitmq.KeyHeader)
	}
	for name, c := range map[string]struct {
		marshaler wamqp.Marshaler
		opts      rabbitmq.Config
	}{
		"marshaler":      {exiting{}, rabbitmq.Config{}},
		"key":            {rabbitmq.Marshaler{}, rabbitmq.Config{Key: key}},
		"key of a shard": {rabbitmq.Marshaler{}, rabbitmq.Config{Key: key, Shards: rabbitmq.Shards{Count: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, topic := fanout(uri, 10), "orders of "+name
			cfg.Marshaler = c.marshaler
			refused := make(chan string, 10)
			c.opts.Malformed = func(_ context.Context, msg *message.Message, _ error) error {
				refused <- msg.UUID
				return nil
			}
			s := subscriber(t, cfg, c.opts)
			if err := s.SubscribeInitialize(topic); err != nil {
				t.Fatal(err)
			}
			newAdmin(t, uri).send(topic, "", publishing("exits", "k"), publishing("second", "k"), publishing("exits", ""), publishing("fourth", ""))
			out := subscribe(t, s, topic)
			for handled := map[string]bool{}; len(handled) < 2; {
				msg := next(t, out)
				handled[msg.UUID] = true
				msg.Ack()
			}
			eventually(t, "both are refused", func() bool { return len(refused) >= 2 })
			eventually(t, "its consumer is there", s.Ready)
			none(t, out)
			if n := len(refused); n != 2 {
				t.Errorf("%d were refused", n)
			}
		})
	}
}

// exitingTopology ends the goroutine that declares a queue.
type exitingTopology struct{ wamqp.DefaultTopologyBuilder }

func (*exitingTopology) BuildTopology(*amqp091.Channel, string, string, wamqp.Config, watermill.LoggerAdapter) error {
	runtime.Goexit()
	return nil
}

func TestSubscriber_ATopologyBuilderThatEndsItsGoroutineHasFailed(t *testing.T) {
	t.Parallel()
	cfg := queues(testserver.RabbitMQ(t), 10)
	cfg.TopologyBuilder = &exitingTopology{}
	s, failed := subscriber(t, cfg, rabbitmq.Config{}), make(chan error, 1)
	go func() {
		_, err := s.Subscribe(context.WithoutCancel(t.Context()), "orders")
		failed <- err
	}()
	eventually(t, "Subscribe returns", func() bool { return len(failed) > 0 })
	if err := <-failed; err == nil {
		t.Error("subscribed")
	}
}
