package main

import (
	"context"
	"fmt"
)

// inboxRow consumes from RabbitMQ into effects in PostgreSQL, by a handler of batches
// and by one of messages, against the stock parts of Watermill.
func inboxRow(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "inbox", "msg/s"
	v, err := b.rounds(ctx, id, unit,
		b.oursConsuming("a handler of batches", inboxBacklog, 0, 1, inBatches()),
		b.oursConsuming("a handler of messages", inboxBacklog, 0, 1, each(true, addRow)),
		b.stock())
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("RabbitMQ to effects in PostgreSQL, %d messages, group commit, ", inboxBacklog)
	const stock = "stock router and subscriber, deduplication in the handler's own transaction"
	return []result{
		compare(id, what+fmt.Sprintf("one call of the handler, with one statement, for a group of up to %d, %d in flight", batchSize, batchesInFlight), stock, unit, ratioAtLeast(15), v[0], v[2]),
		compare(id+"-each", what+fmt.Sprintf("one call for each message, %d in flight", inFlight), stock, unit, ratioAtLeast(15), v[1], v[2]),
	}, nil
}

// inboxLimit is the same against what could be written by hand.
func inboxLimit(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "inbox-limit", "msg/s"
	v, err := b.rounds(ctx, id, unit, b.oursConsuming("ours", inboxBacklog, 0, 1, each(true, addRow)), b.batchLoop())
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("RabbitMQ to effects in PostgreSQL, %d messages, group commit, %d in flight", inboxBacklog, inFlight),
		"a loop over amqp091-go with one transaction and one acknowledgement for each 100",
		unit, ratioAtLeast(0.8), v[0], v[1])}, nil
}

// inboxHot has two consumers whose effects are all on the same few rows.
func inboxHot(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "inbox-hot", "msg/s"
	v, err := b.rounds(ctx, id, unit,
		b.oursConsuming("groups", hotBacklog, 0, 2, each(true, b.countUp)),
		b.oursConsuming("one transaction each", hotBacklog, 0, 2, each(false, b.countUp)))
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("two consumers, effects on %d rows, %d messages, group commit", hotRows, hotBacklog),
		"the same with one transaction for each message",
		unit, ratioAtLeast(1), v[0], v[1])}, nil
}

// growthIDs is what an inbox of 16 messages a second has after a week.
const growthIDs = 10_000_000

// growthInbox has an inbox full of ids.
func growthInbox(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "growth-inbox", "msg/s"
	full, err := b.rounds(ctx, id, unit, b.oursConsuming("10M ids", inboxBacklog, growthIDs, 1, each(true, addRow)))
	if err != nil {
		return nil, err
	}
	empty, err := b.rounds(ctx, id, unit, b.oursConsuming("empty", inboxBacklog, 0, 1, each(true, addRow)))
	if err != nil {
		return nil, err
	}
	return []result{compare(id, "inbox with 10M ids", "the same inbox, empty", unit, ratioAtLeast(0.8), full[0], empty[0])}, nil
}
