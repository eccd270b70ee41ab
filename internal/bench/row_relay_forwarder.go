package main

import (
	"context"
	"fmt"
)

// forwarderSeconds is how long a run of the forwarder, which is slow, is to take.
const forwarderSeconds = 5

const vsForwarder = "relay-vs-forwarder"

// relayVsForwarder compares our relay with Watermill's forwarder, at its best
// settings and at its defaults. Rates are compared; the forwarder gets a smaller
// backlog. If relay-rabbitmq ran before, the forwarder took part in its rounds.
func relayVsForwarder(ctx context.Context, b *bench) ([]result, error) {
	if b.found.forwarder != nil {
		return b.found.forwarder, nil
	}
	stock, best, err := b.forwarderSides(ctx)
	if err != nil {
		return nil, err
	}
	v, err := b.rounds(ctx, vsForwarder, "msg/s", b.oursToRabbitMQ(), best, stock)
	if err != nil {
		return nil, err
	}
	return forwarderResults(best, stock, v[0], v[1], v[2]), nil
}

func forwarderResults(best, stock side, ours, bestValues, stockValues []float64) []result {
	const unit = "msg/s"
	what := fmt.Sprintf("relay drains %d messages from PostgreSQL to RabbitMQ, in order per key, no history", rabbitBacklog)
	return []result{
		compare(vsForwarder, what, fmt.Sprintf("Watermill's %s, %d messages", best.name, best.n), unit, ratioAtLeast(10), ours, bestValues),
		compare(vsForwarder+"-default", what, fmt.Sprintf("Watermill's %s, %d messages", stock.name, stock.n), unit, ratioAtLeast(25), ours, stockValues),
	}
}

// forwarderAlone measures the forwarder with its defaults and at its best.
func forwarderAlone(ctx context.Context, b *bench) ([]result, error) {
	stock, best, err := b.forwarderSides(ctx)
	if err != nil {
		return nil, err
	}
	_, err = b.rounds(ctx, "forwarder", "msg/s", best, stock)
	return nil, err
}

func (b *bench) forwarder(s forwarderSettings, n int) side {
	return side{name: "forwarder, " + s.String(), n: n, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.loadForwarder(ctx, n); err != nil {
			return 0, err
		}
		if err := b.settled(ctx); err != nil {
			return 0, err
		}
		if err := b.freshQueue(); err != nil {
			return 0, err
		}
		took, err := runForwarder(ctx, b.db, b.topology(), s, n)
		if err != nil {
			return 0, err
		}
		return perSecond(n, took), b.verifyQueue(ctx, b.traffic, n, true)
	}}
}

// forwarderSides finds the forwarder's best settings and gives it and the
// defaults backlogs of forwarderSeconds.
func (b *bench) forwarderSides(ctx context.Context) (stock, best side, err error) {
	const trial = 1500
	if err := initForwarder(ctx, b.db); err != nil {
		return side{}, side{}, err
	}
	var candidates []side
	for _, s := range forwarderCandidates {
		candidates = append(candidates, b.forwarder(s, trial))
	}
	at, err := b.best(ctx, "forwarder settings", "msg/s", candidates)
	if err != nil {
		return side{}, side{}, err
	}
	if best, err = b.forSeconds(ctx, func(n int) side { return b.forwarder(forwarderCandidates[at], n) }, trial); err != nil {
		return side{}, side{}, err
	}
	stock, err = b.forSeconds(ctx, func(n int) side { return b.forwarder(forwarderSettings{}, n) }, trial/3)
	return stock, best, err
}

// forSeconds tries a side with trial messages and returns it with as many as
// take it forwarderSeconds.
func (b *bench) forSeconds(ctx context.Context, sized func(n int) side, trial int) (side, error) {
	s := sized(trial)
	rate, err := b.runSide(ctx, s, s.n)
	if err != nil {
		return side{}, fmt.Errorf("%s: %w", s.name, err)
	}
	const round = 100
	return sized(max(trial, int(rate*forwarderSeconds)/round*round)), nil
}
