package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
	"github.com/oncemill/oncemill/crucible/nemesis"
)

// encores are the kinds of fault that bring about a rare state, which the logs show.
var encores = map[string]string{
	"blocked broker":    "rabbitmq-memory-alarm",
	"consumer lost":     "amqp-silent-consumer",
	"nack":              "queue-full",
	"takeover":          "freeze-relay",
	"unfit worker":      "postgres-silent-relay",
	"unroutable return": "topic-without-queue",
}

// encore injects, one after the other, what brings about the rare states that the storms have not:
// whether a fault meets what it is to disturb is chance, and a run without these states proves less.
func (c *crucible) encore(ctx context.Context) error {
	seen := &check.Input{States: map[string]int{}, Resent: map[int][]time.Time{}, Settled: map[string][]time.Time{}}
	if err := c.readLogs(seen); err != nil {
		return err
	}
	kinds := map[string]fault{}
	for _, f := range c.hurt.faults() {
		kinds[f.Name] = f
	}
	for _, state := range slices.Sorted(maps.Keys(encores)) {
		if seen.States[state] > 0 {
			continue
		}
		say("crucible: no %s so far, so %s once more", state, encores[state])
		f, ok := kinds[encores[state]]
		if !ok {
			return fmt.Errorf("no kind of fault is named %q", encores[state])
		}
		if err := c.hurt.strike(ctx, f, nemesis.Fault{Kind: f.Name, Target: f.Targets[0], For: f.Max}); err != nil {
			return err
		}
	}
	return nil
}
