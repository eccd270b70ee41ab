package main

import (
	"context"
	"fmt"
)

// relayVsSkipLocked drains a backlog into a sink that confirms at once, against
// a loop that leases with SKIP LOCKED, and deletes.
func relayVsSkipLocked(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "relay-vs-skiplocked", "msg/s"
	batch, err := b.bestSkipLockedBatch(ctx)
	if err != nil {
		return nil, err
	}
	v, err := b.rounds(ctx, id, unit, b.oursToNowhere(), b.skipLocked(batch))
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("relay drains %d messages into a sink that confirms at once, deletes included, no history", engineBacklog),
		fmt.Sprintf("lease by UPDATE with SKIP LOCKED, then DELETE, prepared, batches of %d", batch),
		unit, ratioAtLeast(2.5), v[0], v[1])}, nil
}

// skipLockedAlone measures the SKIP LOCKED loop with each batch size.
func skipLockedAlone(ctx context.Context, b *bench) ([]result, error) {
	var sides []side
	for _, batch := range skipLockedBatches {
		sides = append(sides, b.skipLocked(batch))
	}
	_, err := b.rounds(ctx, "skiplocked", "msg/s", sides...)
	return nil, err
}

func (b *bench) skipLocked(batch int) side {
	return b.skipLockedOf(skipLockedBacklog, batch)
}

func (b *bench) skipLockedOf(n, batch int) side {
	return side{name: fmt.Sprintf("SKIP LOCKED, batch %d", batch), n: n, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.loadSkipLocked(ctx, n); err != nil {
			return 0, err
		}
		if err := b.settled(ctx); err != nil {
			return 0, err
		}
		took, err := drainSkipLocked(ctx, b.db, b.traffic, n, batch)
		return perSecond(n, took), err
	}}
}

// bestSkipLockedBatch finds the batch size with which the SKIP LOCKED loop is
// fastest.
func (b *bench) bestSkipLockedBatch(ctx context.Context) (int, error) {
	if b.found.skipLockedBatch > 0 {
		return b.found.skipLockedBatch, nil
	}
	var candidates []side
	for _, batch := range skipLockedBatches {
		candidates = append(candidates, b.skipLockedOf(skipLockedBacklog/4, batch))
	}
	at, err := b.best(ctx, "SKIP LOCKED batch", "msg/s", candidates)
	b.found.skipLockedBatch = skipLockedBatches[at]
	return b.found.skipLockedBatch, err
}
