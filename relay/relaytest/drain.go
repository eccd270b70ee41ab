package relaytest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Drain runs a relay from box to sink until nothing is left in the outbox, then
// stops it. What a refusal has made the relay put aside is not in the outbox, so
// look at the sink for what was delivered. Messages that are committed meanwhile
// are delivered too.
//
// It fails when ctx ends before that: give it a deadline. Each call is a whole
// life of a worker and takes some milliseconds; for many messages over a while
// run a relay of your own and use [Sink.Wait].
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

// isEmpty reports that the outbox has no row. That ctx ends is the relay's to
// notice.
func isEmpty(ctx context.Context, box *outbox.Outbox) (bool, error) {
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	rows, err := box.Queue().Read(ctx, outbox.ReadRequest{Lanes: lanes, Rows: 1, Bytes: 1})
	if err != nil && ctx.Err() == nil {
		return false, fmt.Errorf("relaytest: %w", err)
	}
	return err == nil && len(rows) == 0, nil
}
