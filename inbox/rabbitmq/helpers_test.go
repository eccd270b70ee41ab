package rabbitmq_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// maxWait is how long a test waits before it fails.
const maxWait = testserver.MaxWait

var quiet = slog.New(slog.DiscardHandler)

// queues is the configuration of most tests: a topic is the name of a queue.
func queues(uri string, prefetch int) wamqp.Config {
	cfg := wamqp.NewDurableQueueConfig(uri)
	cfg.Consume.Qos.PrefetchCount = prefetch
	return cfg
}

// subscriber returns one that is closed when the test ends.
func subscriber(t testing.TB, cfg wamqp.Config, opts rabbitmq.Config) *rabbitmq.Subscriber {
	t.Helper()
	if opts.Logger == nil {
		opts.Logger = quiet
	}
	if opts.CloseTimeout == 0 {
		opts.CloseTimeout = 100 * time.Millisecond
	}
	s, err := rabbitmq.New(cfg, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func subscribe(t testing.TB, s message.Subscriber, topic string) <-chan *message.Message {
	t.Helper()
	out, err := s.Subscribe(context.WithoutCancel(t.Context()), topic)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func next(t testing.TB, out <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case msg, open := <-out:
		if !open {
			t.Fatal("no more messages")
		}
		return msg
	case <-time.After(maxWait):
		t.Fatal("no message in time")
		return nil
	}
}

// none fails if a message comes while the rest of the test had time for it.
func none(t testing.TB, out <-chan *message.Message) {
	t.Helper()
	select {
	case msg, open := <-out:
		if open {
			t.Fatalf("message %q too much", msg.UUID)
		}
	case <-time.After(50 * time.Millisecond):
	}
}

var eventually = testserver.Eventually

// admin is a raw channel, in confirm mode, of a connection of its own.
type admin struct {
	t    testing.TB
	uri  string
	conn *amqp091.Connection
	ch   *amqp091.Channel

	mu sync.Mutex
}

func newAdmin(t testing.TB, uri string) *admin {
	t.Helper()
	conn, err := amqp091.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	return &admin{t: t, uri: uri, conn: conn, ch: ch}
}

func (a *admin) declare(queue string, args amqp091.Table) {
	a.t.Helper()
	if _, err := a.ch.QueueDeclare(queue, true, false, false, false, args); err != nil {
		a.t.Fatal(err)
	}
}

// publish returns once the broker has confirmed.
func (a *admin) publish(queue string, all ...amqp091.Publishing) {
	a.t.Helper()
	a.send("", queue, all...)
}

// send is publish for an exchange.
func (a *admin) send(exchange, key string, all ...amqp091.Publishing) {
	a.t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	var confirms []*amqp091.DeferredConfirmation
	for _, p := range all {
		p.DeliveryMode = amqp091.Persistent
		confirm, err := a.ch.PublishWithDeferredConfirm(exchange, key, true, false, p)
		if err != nil {
			a.t.Fatal(err)
		}
		confirms = append(confirms, confirm)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.t.Context()), maxWait)
	defer cancel()
	for _, confirm := range confirms {
		if ok, err := confirm.WaitContext(ctx); !ok || err != nil {
			a.t.Fatalf("confirmed: %t, %v", ok, err)
		}
	}
}

func publishing(id, key string) amqp091.Publishing {
	p := amqp091.Publishing{MessageId: id, Body: []byte(id)}
	if key != "" {
		p.Headers = amqp091.Table{rabbitmq.KeyHeader: key}
	}
	return p
}

// left counts what is in a queue that nobody consumes from.
func (a *admin) left(queue string) (n int, redelivered map[string]bool) {
	a.t.Helper()
	redelivered = map[string]bool{}
	for {
		d, ok, err := a.ch.Get(queue, true)
		if err != nil {
			a.t.Fatal(err)
		}
		if !ok {
			return n, redelivered
		}
		n++
		redelivered[d.MessageId] = d.Redelivered
	}
}
