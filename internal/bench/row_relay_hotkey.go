package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

const hotkeyBacklog = 60_000

// relayHotKey drains a backlog of one key in a pipeline, against amqp091-go alone.
func relayHotKey(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "relay-hotkey", "msg/s"
	window, err := b.bestRawWindow(ctx)
	if err != nil {
		return nil, err
	}
	hot := *b
	hot.traffic = &traffic{noise: b.traffic.noise, keys: 1}
	ours := side{name: "ours, one key", n: hotkeyBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := hot.loadOutbox(ctx, n); err != nil {
			return 0, err
		}
		if err := hot.settled(ctx); err != nil {
			return 0, err
		}
		if err := b.freshQueue(); err != nil {
			return 0, err
		}
		sink, err := rabbitmq.New(b.topology(), rabbitmq.Config{Logger: b.log})
		if err != nil {
			return 0, err
		}
		took, err := hot.drainWith(ctx, n, false, sink, relay.Config{Order: relay.OrderPerKeyPipelined})
		return perSecond(n, took), errors.Join(err, b.verifyQueue(ctx, hot.traffic, n, true))
	}}
	v, err := b.rounds(ctx, id, unit, ours, hot.raw(hotkeyBacklog, window))
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("relay drains %d messages of one key from PostgreSQL to RabbitMQ in a pipeline, no history", hotkeyBacklog),
		fmt.Sprintf("amqp091-go alone publishing them from memory, deferred confirms, window %d", window),
		unit, ratioAtLeast(0.8), v[0], v[1])}, nil
}
