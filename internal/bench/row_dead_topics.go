package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
)

const (
	deadTopicsCount    = 100_000
	deadTopicsMessages = 30_000 // healthy ones
)

// deadTopics relays a steady stream beside topics without a queue, each with one
// message, all of them committed before the relay starts: it has to find out about
// each of them while the stream goes on.
func deadTopics(ctx context.Context, b *bench) ([]result, error) {
	const id = "dead-topics"
	log := b.log
	b.log = slog.New(slog.NewTextHandler(io.Discard, nil)) // a warning for each topic
	defer func() { b.log = log }()
	var rates, p99s [2][]float64
	timed := func(at int, name string, beside func(context.Context, *outbox.Outbox) error) side {
		return side{name: name, n: deadTopicsMessages, run: func(ctx context.Context, n int) (float64, error) {
			if n < deadTopicsMessages { // the warm-up
				n, beside = latencyWarm, nothing
			}
			begin := time.Now()
			watch, err := b.oursPaced(latencyRate, beside)(ctx, n)
			if err != nil {
				return 0, err
			}
			rate, p99 := watch.rate(), watch.quantiles(0, 0.99)[0]
			b.say("%-20s %s: %.0f msg/s, p99 %.0f ms, in %v", id, name, rate, p99, time.Since(begin).Truncate(time.Second))
			if n == deadTopicsMessages {
				rates[at], p99s[at] = append(rates[at], rate), append(p99s[at], p99)
			}
			return rate, nil
		}}
	}
	_, err := b.rounds(ctx, id, "msg/s", timed(0, "beside dead topics", publishDeadTopics), timed(1, "without", nothing))
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("%d healthy messages at %d a second beside %d messages of topics without a queue, committed before", deadTopicsMessages, latencyRate, deadTopicsCount)
	const against = "the same without them"
	return []result{
		compare(id, what+": delivered", against, "msg/s", ratioAtLeast(0.95), rates[0], rates[1]),
		compare(id+"-p99", what+": commit to confirm, 99th percentile", against, "ms", oursAtMost(1000), p99s[0], p99s[1]),
	}, nil
}

func publishDeadTopics(ctx context.Context, box *outbox.Outbox) error {
	const each = 1000
	for first := 0; first < deadTopicsCount; first += each {
		err := box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			var errs []error
			for i := first; i < first+each; i++ {
				msg := message.NewMessage("dead-"+strconv.Itoa(i), make([]byte, payloadSize))
				errs = append(errs, box.Publish(ctx, tx, "bench.reply."+strconv.Itoa(i), msg))
			}
			return errors.Join(errs...)
		})
		if err != nil {
			return fmt.Errorf("publish to dead topics: %w", err)
		}
	}
	return nil
}
