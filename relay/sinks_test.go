package relay_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// receive acknowledges what comes from a subscriber and records it, until the
// test ends.
func receive(t testing.TB, from message.Subscriber, topic string) *wire {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	messages, err := from.Subscribe(ctx, topic)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	var group sync.WaitGroup
	group.Go(func() {
		for m := range messages {
			if string(m.Payload) != "payload" && string(m.Payload) != `{"pay":"load"}` {
				t.Errorf("message %s has payload %q", m.UUID, m.Payload)
			}
			w.note("subscriber", m)
			m.Ack()
		}
	})
	t.Cleanup(func() {
		cancel()
		if err := from.Close(); err != nil {
			t.Error(err)
		}
		group.Wait()
	})
	return w
}

// watermill-amqp as it comes, confirming each message.
func TestFromPublisher_DeliversToStockWatermillAMQP(t *testing.T) {
	t.Parallel()
	config := amqp.NewDurableQueueConfig(testserver.RabbitMQ(t))
	config.Publish.ConfirmDelivery = true
	config.Publish.ChannelPoolSize = 4
	publisher, err := amqp.NewPublisher(config, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { publisher.Close() })
	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	w := receive(t, subscriber, "orders")
	s, err := relay.NewPublisherSink(publisher, relay.PublisherConfig{Parallel: 4})
	if err != nil {
		t.Fatal(err)
	}
	p := onPostgres(t)
	r := start(t, p.box(t), s, unhurried)
	all := append(spread(20, 5), unkeyed(40)...)
	commit(t, p.box(t), all...)
	p.awaitNothingOwed(t)
	w.await(t, len(all))
	r.stop()
	w.check(t, all, 0)
}

// watermill-sql with PostgreSQL as the broker. It waits for all transactions of the whole
// server, so this has one to itself.
func TestPublisherSink_DeliversToWatermillSQL(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	p := onServer(t, server)
	broker := server.Open("search_path=public")
	schema := sql.DefaultPostgreSQLSchema{}
	publisher, err := sql.NewPublisher(broker, sql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	subscriber, err := sql.NewSubscriber(broker, sql.SubscriberConfig{
		SchemaAdapter: schema, OffsetsAdapter: sql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true, PollInterval: 10 * time.Millisecond, ConsumerGroup: "test",
	}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	w := receive(t, subscriber, "orders")
	s, err := relay.NewPublisherSink(publisher, relay.PublisherConfig{Parallel: 2})
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, p.box(t), s, unhurried)
	all := append(spread(20, 5), unkeyed(40)...)
	for _, m := range all {
		m.Payload = []byte(`{"pay":"load"}`)
	}
	commit(t, p.box(t), all...)
	p.awaitNothingOwed(t)
	w.await(t, len(all))
	r.stop()
	w.check(t, all, 0)
}
