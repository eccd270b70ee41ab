package mill_test

import (
	"errors"
	"log/slog"
	"math"
	"slices"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

var quiet = slog.New(slog.DiscardHandler)

// stock is a consumer without faults.
func stock() mill.Consumer {
	return mill.Consumer{
		Name: "stock", Topic: "orders", Replays: &channel{},
		Subscriber: func(*inbox.Inbox) (message.Subscriber, error) { return &channel{}, nil },
		Handler:    func(*message.Message) ([]*message.Message, error) { return nil, nil },
	}
}

func TestNew_ReportsAllBadSettings(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	consumer := func(change func(*mill.Consumer)) func(*mill.Config) {
		return func(cfg *mill.Config) {
			c := stock()
			change(&c)
			cfg.Consumers = []mill.Consumer{c}
		}
	}
	for name, of := range map[string]struct {
		change func(*mill.Config)
		fields []string
	}{
		"nothing": {func(*mill.Config) {}, []string{"mill.Config.Outbox"}},
		"a sink without an outbox": {func(cfg *mill.Config) {
			cfg.Sink = relay.FromPublisher(&channel{})
		}, []string{"mill.Config.Outbox"}},
		"an empty consumer": {func(cfg *mill.Config) { cfg.Consumers = []mill.Consumer{{}} }, []string{
			"mill.Config.Consumers[0].Name", "mill.Config.Consumers[0].Topic", "mill.Config.Consumers[0].Subscriber", "mill.Config.Consumers[0].Handler",
		}},
		"two consumers of one name":  {func(cfg *mill.Config) { cfg.Consumers = []mill.Consumer{stock(), stock()} }, []string{"mill.Config.Consumers[1].Name"}},
		"messages without an outbox": {consumer(func(c *mill.Consumer) { c.Produces = "answers" }), []string{"mill.Config.Consumers[0].Produces"}},
		"what the mill sets": {consumer(func(c *mill.Consumer) {
			c.Inbox.Consumer, c.Inbox.Replays = "other", &inbox.Replays{}
		}), []string{"mill.Config.Consumers[0].Inbox.Consumer", "mill.Config.Consumers[0].Inbox.Replays"}},
		"another database": {func(cfg *mill.Config) {
			cfg.Outbox = &outbox.Config{Database: oncemill.Config{Prefix: "other_"}}
			cfg.Idempotency, cfg.Keys.Database.Prefix = &idempotency.Config{Scope: idempotency.SingleTenant()}, "third_"
		}, []string{"mill.Config.Outbox.Database", "mill.Config.Keys.Database"}},
		"settings without effect": {func(cfg *mill.Config) {
			cfg.Consumers, cfg.Relay, cfg.Keys.Prepare = []mill.Consumer{stock()}, relay.Config{Batch: 5, LetterRetention: time.Hour}, true
		}, []string{"mill.Config.Relay", "mill.Config.Keys"}},
		"no time to stop": {func(cfg *mill.Config) {
			cfg.Outbox, cfg.StopTimeout = &outbox.Config{}, time.Millisecond
		}, []string{"mill.Config.StopTimeout"}},
		"all time to stop": {func(cfg *mill.Config) { // any margin would overflow
			cfg.Outbox, cfg.StopTimeout = &outbox.Config{}, math.MaxInt64
		}, []string{"mill.Config.StopTimeout"}},
		"a replayed letter without replays": {consumer(func(c *mill.Consumer) {
			c.Replays = nil
			c.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) {
				return struct{ message.Subscriber }{&channel{}}, nil
			}
		}), []string{"mill.Consumer.Replays"}},
		"a handler that outlives its delivery": {consumer(func(c *mill.Consumer) {
			c.Subscriber = func(in *inbox.Inbox) (message.Subscriber, error) {
				return inboxrabbitmq.New(wamqp.NewDurableQueueConfig("amqp://localhost"), inboxrabbitmq.Config{AckTimeout: time.Minute, Malformed: in.Refuse})
			}
		}), []string{"mill.Consumer.Inbox.Timeout"}},
		"two consumers of one queue": {func(cfg *mill.Config) {
			for _, name := range []string{"stock", "mail", "own"} {
				c := stock()
				c.Name, c.Replays = name, nil
				c.Subscriber = func(in *inbox.Inbox) (message.Subscriber, error) {
					queue := wamqp.NewDurableQueueConfig("amqp://localhost") // named as the topic
					if name == "own" {
						queue = wamqp.NewDurablePubSubConfig("amqp://localhost", wamqp.GenerateQueueNameTopicNameWithSuffix(name))
					}
					return inboxrabbitmq.New(queue, inboxrabbitmq.Config{Malformed: in.Refuse})
				}
				cfg.Consumers = append(cfg.Consumers, c)
			}
		}, []string{"mill.Consumer.Subscriber"}},
		"several parts": {func(cfg *mill.Config) {
			consumer(func(c *mill.Consumer) { c.Inbox.Consumer, c.Inbox.Retention = "other", 1 })(cfg)
			cfg.StopTimeout, cfg.Idempotency, cfg.Outbox = 1, &idempotency.Config{}, &outbox.Config{MaxPayload: -1}
		}, []string{
			"mill.Config.StopTimeout", "mill.Config.Consumers[0].Inbox.Consumer", "outbox.Config.MaxPayload",
			"idempotency.Config.Scope", "inbox.Config.Retention",
		}},
		"a part of its own": {func(cfg *mill.Config) { cfg.Idempotency = &idempotency.Config{} }, []string{"idempotency.Config.Scope"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := mill.Config{Logger: quiet}
			of.change(&cfg)
			_, err := mill.New(db, cfg)
			if got := fieldsOf(err); !slices.Equal(got, of.fields) {
				t.Errorf("got %q: %v", got, err)
			}
		})
	}
	if _, err := mill.New(nil, mill.Config{}); !slices.Equal(fieldsOf(err), []string{"mill.New db"}) {
		t.Errorf("without a database: %v", err)
	}
}

// fieldsOf returns the fields of all ConfigErrors in err.
func fieldsOf(err error) (fields []string) {
	var one *oncemill.ConfigError
	switch joined := err.(type) { //nolint:errorlint // it looks for each of the joined errors
	case nil:
	case interface{ Unwrap() []error }:
		for _, e := range joined.Unwrap() {
			fields = append(fields, fieldsOf(e)...)
		}
	default:
		if errors.As(err, &one) {
			fields = append(fields, one.Field)
		}
	}
	return fields
}

// A subscriber that was made before another part did not fit is closed.
func TestNew_ClosesSubscribersOnError(t *testing.T) {
	t.Parallel()
	made, broken := &channel{}, errors.New("broken")
	first, second := stock(), stock()
	first.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) { return made, nil }
	second.Name = "mail"
	second.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) { return nil, broken }
	_, err := mill.New(testserver.SQLite(t), mill.Config{Consumers: []mill.Consumer{first, second}, Logger: quiet})
	if !errors.Is(err, broken) || made.closed.Load() == 0 {
		t.Errorf("closed %d times: %v", made.closed.Load(), err)
	}
}

// The caller's settings are not written to: they may serve another mill.
func TestNew_DoesNotChangeItsConfig(t *testing.T) {
	t.Parallel()
	box, keys := &outbox.Config{}, &idempotency.Config{Scope: idempotency.SingleTenant()}
	cfg := mill.Config{Outbox: box, Idempotency: keys, Consumers: []mill.Consumer{stock()}, Logger: quiet}
	for range 2 {
		if _, err := mill.New(testserver.SQLite(t), cfg); err != nil {
			t.Fatal(err)
		}
	}
	if box.Logger != nil || keys.OnCommit != nil || keys.Logger != nil || cfg.Consumers[0].Inbox.Logger != nil {
		t.Error("the settings were changed")
	}
}
