package main

import (
	"context"
	"fmt"
)

// relayEngine drains a backlog into a sink that confirms at once, against the
// fastest way to get the same rows out of PostgreSQL.
func relayEngine(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "relay-engine", "msg/s"
	v, err := b.rounds(ctx, id, unit, b.oursToNowhere(), b.copyOut())
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("relay drains %d messages into a sink that confirms at once, deletes included, no history", engineBacklog),
		"binary COPY of the same rows to the client (pgx)",
		unit, ratioAtLeast(0.3), v[0], v[1])}, nil
}

// copyAlone measures COPY.
func copyAlone(ctx context.Context, b *bench) ([]result, error) {
	_, err := b.rounds(ctx, "copy", "msg/s", b.copyOut())
	return nil, err
}

func (b *bench) copyOut() side {
	return side{name: "COPY", n: engineBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.loadOutbox(ctx, n); err != nil {
			return 0, err
		}
		if err := b.settled(ctx); err != nil {
			return 0, err
		}
		took, err := copyOut(ctx, b.servers.postgres, n)
		return perSecond(n, took), err
	}}
}
