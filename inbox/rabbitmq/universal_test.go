package rabbitmq_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// Watermill's own suite, over the stock publisher. With a prefetch of 1 the
// subscriber does what the stock one does; with more it keeps the order of keys
// only, and messages of the suite have none. A prefetch of 1 is also that of the suite through an
// inbox.
func TestSubscriber_PassesTheUniversalSuite(t *testing.T) {
	t.Parallel()
	type setup struct{ prefetch, shards int }
	short := map[string]setup{"shards": {50, 3}}
	for name, c := range testserver.Rounds(short, map[string]setup{"prefetch 1": {1, 0}, "prefetch 50": {50, 0}, "shards": {50, 3}}) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runSuite(t, c.prefetch, shards(c.shards, 0).Shards, func(_ *testing.T, s message.Subscriber, _ string) message.Subscriber { return s })
		})
	}
}

// The same with an inbox between the subscriber and the reader.
func TestSubscriber_PassesTheUniversalSuiteThroughAnInbox(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	pg.DB.SetMaxOpenConns(30)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	runSuite(t, 1, rabbitmq.Shards{}, func(t *testing.T, s message.Subscriber, consumer string) message.Subscriber {
		return throughInbox{Subscriber: s, make: func(topic string) (*inbox.Inbox, error) {
			return inbox.New(pg.DB, inbox.Config{Consumer: consumer + " " + topic, Database: pg.Config, Logger: quiet})
		}}
	})
}

func runSuite(t *testing.T, prefetch int, shards rabbitmq.Shards, wrap func(*testing.T, message.Subscriber, string) message.Subscriber) {
	uri := testserver.RabbitMQ(t)
	pair := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		cfg := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix(group))
		cfg.Publish.ConfirmDelivery = true
		cfg.Publish.ChannelPoolSize = 10
		cfg.Consume.Qos.PrefetchCount = prefetch
		publisher, err := wamqp.NewPublisher(cfg, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		subscriber, err := rabbitmq.New(cfg, rabbitmq.Config{
			NackDelay: time.Millisecond, NackDelayMax: time.Millisecond, CloseTimeout: time.Second, Logger: quiet, Shards: shards,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // the suite forgets one
			if err := subscriber.Close(); err != nil {
				t.Error(err)
			}
		})
		return publisher, wrap(t, subscriber, group)
	}
	features := tests.Features{
		ConsumerGroups:                      true,
		GuaranteedOrder:                     prefetch == 1,
		GuaranteedOrderWithSingleSubscriber: shards.Count == 0,
		Persistent:                          true,
		ForceShort:                          !testserver.Long(),
	}
	run := func(name string, test func(*testing.T, tests.TestContext)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, tests.TestContext{TestID: tests.NewTestID(), Features: features})
		})
	}
	for name, test := range universal {
		if ordered := name == "NoAck" || name == "PublishSubscribeInOrder"; ordered && !features.GuaranteedOrder {
			continue
		}
		run(name, func(t *testing.T, suite tests.TestContext) {
			test(t, suite, func(t *testing.T) (message.Publisher, message.Subscriber) { return pair(t, "test") })
		})
	}
	run("ConsumerGroups", func(t *testing.T, suite tests.TestContext) { tests.TestConsumerGroups(t, suite, pair) })
}

// universal is what tests.TestPubSub runs, but for NewSubscriberReceivesOldMessages
// (a queue is not a log) and Reconnect (it races in its own code; there is one of
// ours). Both would be skipped, and the names of skipped tests hold random ids.
var universal = map[string]func(*testing.T, tests.TestContext, tests.PubSubConstructor){
	"PublishSubscribe":                  tests.TestPublishSubscribe,
	"ConcurrentSubscribe":               tests.TestConcurrentSubscribe,
	"ConcurrentSubscribeMultipleTopics": tests.TestConcurrentSubscribeMultipleTopics,
	"ResendOnError":                     tests.TestResendOnError,
	"NoAck":                             tests.TestNoAck,
	"ContinueAfterSubscribeClose":       tests.TestContinueAfterSubscribeClose,
	"ConcurrentClose":                   tests.TestConcurrentClose,
	"ContinueAfterErrors":               tests.TestContinueAfterErrors,
	"PublishSubscribeInOrder":           tests.TestPublishSubscribeInOrder,
	"PublisherClose":                    tests.TestPublisherClose,
	"Topic":                             tests.TestTopic,
	"MessageCtx":                        tests.TestMessageCtx,
	"SubscribeCtx":                      tests.TestSubscribeCtx,
}

// throughInbox handles every message in an inbox, with a handler that hands it on
// and waits for what becomes of it.
type throughInbox struct {
	message.Subscriber
	make func(topic string) (*inbox.Inbox, error)
}

func (s throughInbox) SubscribeInitialize(topic string) error {
	return s.Subscriber.(message.SubscribeInitializer).SubscribeInitialize(topic)
}

func (s throughInbox) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.make(topic)
	if err != nil {
		return nil, err
	}
	deliveries, err := s.Subscriber.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	handle := in.Middleware(func(delivered *message.Message) ([]*message.Message, error) {
		msg := delivered.Copy()
		msg.SetContext(delivered.Context())
		select {
		case out <- msg:
		case <-msg.Context().Done():
			return nil, msg.Context().Err()
		}
		select {
		case <-msg.Acked():
			return nil, nil
		case <-msg.Nacked():
			return nil, errNacked
		case <-msg.Context().Done():
			return nil, msg.Context().Err()
		}
	})
	go func() {
		defer close(out)
		for msg := range deliveries {
			if _, err := handle(msg); err != nil {
				msg.Nack()
			} else {
				msg.Ack()
			}
		}
	}()
	return out, nil
}

var errNacked = errors.New("nacked")
