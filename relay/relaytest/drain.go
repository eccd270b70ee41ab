package relaytest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Drain runs a relay from box to sink until the outbox is empty, then stops it. Messages
// that the relay has set aside after a refusal are not in the outbox, so check the sink
// for what was delivered. Messages that are committed meanwhile are delivered too.
//
// It fails if ctx ends before that, so give ctx a deadline. Each call starts and stops a
// worker, which takes some milliseconds. For many messages over a longer time, run a relay
// of your own and use [Sink.Wait].
func Drain(ctx context.Context, box *outbox.Outbox, sink relay.Sink) error {
	worker, err := relay.New(box, sink, relay.Config{
		Name: "relaytest", PollMax: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(running) }()
	for {
		empty, err := isEmpty(ctx, box)
		if empty || err != nil {
			stop()
			return errors.Join(err, <-ended)
		}
		timer := time.NewTimer(2 * time.Millisecond)
		select {
		case <-timer.C:
		case err := <-ended:
			timer.Stop()
			if err == nil { // ctx has ended
				err = fmt.Errorf("relaytest: messages are left in the outbox: %w", ctx.Err())
			}
			return err
		}
	}
}

// isEmpty reports whether the outbox has no row. The relay notices the end of ctx.
func isEmpty(ctx context.Context, box *outbox.Outbox) (bool, error) {
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	rows, err := outboxqueue.Of(box).Read(ctx, outboxstore.ReadRequest{Lanes: lanes, Rows: 1, Bytes: 1})
	if err != nil && ctx.Err() == nil {
		return false, fmt.Errorf("relaytest: %w", err)
	}
	return err == nil && len(rows) == 0, nil
}
