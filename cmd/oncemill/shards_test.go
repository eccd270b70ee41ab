package main

import (
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The command moves the shards of a consumer that was made by rabbitmq.Queue.
func TestMoveShardsCommand_MovesTheShardsOfAQueue(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	start := func(count, previous int) func() {
		subscriber, err := rabbitmq.Queue(uri, "stock", rabbitmq.Config{
			Shards: rabbitmq.Shards{Count: count, Previous: previous, Rebalance: 20 * time.Millisecond},
		})(nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := subscriber.Subscribe(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := subscriber.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	start(2, 0)()
	defer start(3, 2)()
	for range 2 { // it may be called again
		cmd, output := command(t.Context(), nil, "move-shards", "--amqp-url", uri, "--topic", "orders", "--consumer", "stock", "--previous", "2", "--count", "3")
		if err := cmd.Run(); err != nil || !strings.Contains(output.String(), "messages of orders go to 3 shards") {
			t.Fatalf("%v: %s", err, output)
		}
	}
	start(3, 0)() // which is an error before
}
