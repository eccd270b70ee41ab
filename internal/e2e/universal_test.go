package e2e

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// Watermill's suite for publishers and subscribers, with an outbox and a relay as
// the publisher. ForceShort makes it a matter of hundreds of messages instead of
// thousands, but for ONCEMILL_LONG. Its flags here:
//
//   - GuaranteedOrder: per key, of which the suite makes sixteen; the outbox takes
//     the payload, which tells them apart, for the key.
//   - ExactlyOnceDelivery: as in GoChannel's own tests; there is no fault in it, and
//     without one a relay repeats nothing. Not over RabbitMQ, where the suite closes
//     subscribers in the middle.
//   - ContextPreserved: no, a context does not go through a database.
//   - RestartServiceCommand: none. The test for it reads what a goroutine of its own
//     writes, which the race detector reports, and leaves that goroutine behind.
//     Without the detector it passes over RabbitMQ: 10,000 messages, two restarts.
//   - NewSubscriberReceivesOldMessages: neither way out keeps what was consumed.
//   - the others are those of the way out.
func universal(features tests.Features) tests.Features {
	features.ForceShort = !long
	return features
}

// The flags of a GoChannel are those of its own tests. It has no order, and what it
// keeps is gone with it. Each call makes one, and an outbox and a relay with it.
func TestUniversal_GoChannel(t *testing.T) {
	t.Parallel()
	construct := func(t *testing.T) (message.Publisher, message.Subscriber) {
		channel := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 10_000, Persistent: true}, watermill.NopLogger{})
		box := sqliteBox(t)
		runRelay(t, box, relay.FromPublisher(channel))
		return &txPublisher{box: box}, channel
	}
	tests.TestPubSub(t, universal(tests.Features{RequireSingleInstance: true, ExactlyOnceDelivery: true}), construct, nil)
}

// The flags for RabbitMQ are those of watermill-amqp's own tests, whose subscriber
// it is.
func TestUniversal_RabbitMQ(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	sink, err := rabbitmq.New(amqp.NewDurablePubSubConfig(uri, nil), rabbitmq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	box := postgresBox(t)
	runRelay(t, box, sink)
	ofGroup := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		subscriber, err := amqp.NewSubscriber(amqp.NewDurablePubSubConfig(uri, amqp.GenerateQueueNameTopicNameWithSuffix(group)), watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		return &txPublisher{box: box}, subscriber
	}
	construct := func(t *testing.T) (message.Publisher, message.Subscriber) { return ofGroup(t, "test") }
	tests.TestPubSub(t, universal(tests.Features{
		ConsumerGroups: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, Persistent: true,
	}), construct, ofGroup)
}

func sqliteBox(t *testing.T) *outbox.Outbox {
	t.Helper()
	return newBox(t, testserver.SQLite(t), oncemill.Config{})
}

func postgresBox(t *testing.T) *outbox.Outbox {
	t.Helper()
	pg := testserver.Postgres(t)
	return newBox(t, pg.DB, pg.Config)
}

func newBox(t *testing.T, db *sql.DB, database oncemill.Config) *outbox.Outbox {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, database, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: database, Key: func(m *message.Message) string { return string(m.Payload) }})
	if err != nil {
		t.Fatal(err)
	}
	return box
}

// runRelay runs a relay until the test ends.
func runRelay(t *testing.T, box *outbox.Outbox, sink relay.Sink) {
	t.Helper()
	worker, err := relay.New(box, sink, relay.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("relay: %v", err)
		}
	})
}

// txPublisher publishes each call in a transaction of its own.
type txPublisher struct {
	box *outbox.Outbox

	mu     sync.RWMutex // guards closed; held for reading by calls under way
	closed bool
}

func (p *txPublisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.closed {
		return errors.New("the publisher is closed")
	}
	return p.box.RunInTx(context.Background(), func(_ context.Context, tx *sql.Tx) error {
		return p.box.Publisher(tx).Publish(topic, messages...)
	})
}

func (p *txPublisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return nil
}
