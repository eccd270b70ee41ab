package rabbitmq

import (
	"log/slog"
	"testing"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill/internal/testserver"
)

// A subscriber that is closed consumes no more from shards that still exist. Were they taken for drained, it would go
// on to the next layout; there may be none, and the process would panic.
func TestShardSet_IsNotDrainedWhenItsSubscriberIsClosed(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	open := func(moving Shards) (*Subscriber, *shardSet, []member) {
		t.Helper()
		cfg := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix("stock"))
		cfg.Consume.Qos.PrefetchCount = 10
		s, err := New(cfg, Config{Shards: moving, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.hold(); err != nil {
			t.Fatal(err)
		}
		set := s.newShardSet("orders")
		members, err := set.begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s, set, members
	}
	for _, moving := range []Shards{{Count: 2}, {Count: 3, Previous: 2}} {
		s, set, members := open(moving)
		if (set.next == nil) != (moving.Previous == 0) {
			t.Fatalf("%+v: the next layout is %v", moving, set.next)
		}
		drained := make(chan bool, 1)
		go func() {
			defer s.group.Done()
			drained <- set.consume(t.Context(), members) // whose context has not ended yet when the subscriber is closed
		}()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if <-drained {
			t.Errorf("%+v: the shards count as drained", moving)
		}
	}
}
