package main

import (
	"context"
	"fmt"
)

// relayRabbitMQ drains a backlog from PostgreSQL to RabbitMQ, in order per key,
// against amqp091-go alone publishing the same messages.
func relayRabbitMQ(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "relay-rabbitmq", "msg/s"
	window, err := b.bestRawWindow(ctx)
	if err != nil {
		return nil, err
	}
	sides := []side{b.oursToRabbitMQ(), b.raw(rabbitBacklog, window)}
	if b.chosen[vsForwarder] {
		// One more use of our runs: the forwarder takes part in these rounds.
		stock, best, err := b.forwarderSides(ctx)
		if err != nil {
			return nil, err
		}
		sides = append(sides, best, stock)
	}
	v, err := b.rounds(ctx, id, unit, sides...)
	if err != nil {
		return nil, err
	}
	if len(sides) > 2 {
		b.found.forwarder = forwarderResults(sides[2], sides[3], v[0], v[2], v[3])
	}
	return []result{compare(id,
		fmt.Sprintf("relay drains %d messages from PostgreSQL to RabbitMQ, in order per key, no history", rabbitBacklog),
		fmt.Sprintf("amqp091-go alone publishing them from memory, deferred confirms, window %d", window),
		unit, ratioAtLeast(0.95), v[0], v[1])}, nil
}

// rawAlone measures amqp091-go alone with each window.
func rawAlone(ctx context.Context, b *bench) ([]result, error) {
	var sides []side
	for _, window := range rawWindows {
		sides = append(sides, b.raw(rabbitBacklog, window))
	}
	_, err := b.rounds(ctx, "raw", "msg/s", sides...)
	return nil, err
}

func (b *bench) raw(n, window int) side {
	return side{name: fmt.Sprintf("raw, window %d", window), n: n, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.freshQueue(); err != nil {
			return 0, err
		}
		took, err := publishRaw(ctx, b.servers.amqp, b.traffic, n, window)
		if err != nil {
			return 0, err
		}
		return perSecond(n, took), b.verifyQueue(ctx, b.traffic, n, true)
	}}
}

// bestRawWindow finds the window with which amqp091-go alone is fastest.
func (b *bench) bestRawWindow(ctx context.Context) (int, error) {
	var candidates []side
	for _, window := range rawWindows {
		candidates = append(candidates, b.raw(rabbitBacklog/4, window))
	}
	at, err := b.best(ctx, "raw window", "msg/s", candidates)
	return rawWindows[at], err
}
