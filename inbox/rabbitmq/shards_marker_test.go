package rabbitmq_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
)

// What is retried for longer than AckTimeout before the end of a shard costs no channel: the marker goes back to
// the queue in time, as other deliveries do.
func TestShards_TheMarkerIsGivenBackBeforeAckTimeout(t *testing.T) {
	t.Parallel()
	node := testserver.PrivateRabbitMQ(t)
	node.Eval("application:set_env(rabbit, consumer_timeout, 5000), application:set_env(rabbit, channel_tick_interval, 200)")
	a := newAdmin(t, node.URI())
	declareOneShard(t, fanout(node.URI(), 10))
	var log bytes.Buffer
	cfg := shards(2, 1)
	cfg.AckTimeout, cfg.NackDelay = 2*time.Second, time.Hour // given back after 1.6 s
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	s := subscriber(t, fanout(node.URI(), 10), cfg)
	out := subscribe(t, s, "orders")
	a.send("orders", "", publishing("retried", "k"))
	next(t, out).Nack()
	if err := s.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		next(t, out).Nack()
	}
	next(t, out).Ack()
	eventually(t, "the shard is removed", func() bool { return !a.exists(shardName(1, 0)) })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "consumer lost") {
			t.Error(line)
		}
	}
}
