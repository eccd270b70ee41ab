package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const (
	scaleBacklog = 30_000
	scaleWindow  = 32 // of each worker: the sink's latency is the limit
	sinkLatency  = 5 * time.Millisecond
)

// slowSink confirms a message after a while.
type slowSink struct{ *ledgerSink }

func (s slowSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	time.AfterFunc(sinkLatency, func() { s.ledgerSink.Publish(ctx, msgs, done) })
}

// scaleOut measures how much faster 2 and 4 workers are than one, where the
// latency of the sink is what limits each.
func scaleOut(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "scale-out", "msg/s"
	v, err := b.rounds(ctx, id, unit, b.workers(1), b.workers(2), b.workers(4))
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("%%d workers, %d in flight each, drain %d messages into a sink that confirms after %v", scaleWindow, scaleBacklog, sinkLatency)
	return []result{
		compare(id+"-2", fmt.Sprintf(what, 2), "one worker", unit, ratioAtLeast(1.9), v[1], v[0]),
		compare(id+"-4", fmt.Sprintf(what, 4), "one worker", unit, ratioAtLeast(3.6), v[2], v[0]),
	}, nil
}

// workers is a side of so many workers, that share the lanes before the backlog
// is committed.
func (b *bench) workers(count int) side {
	return side{name: fmt.Sprintf("%d workers", count), n: scaleBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.exec(ctx, "empty outbox", `truncate oncemill.outbox, oncemill.outbox_history`); err != nil {
			return 0, err
		}
		sink := newLedgerSink(b.traffic, n)
		watch := newCountingSink(slowSink{sink}, n)
		run, stop := context.WithCancel(ctx)
		defer stop()
		stopped := make(chan error, count)
		boxes := make([]*outbox.Outbox, count)
		for i := range count {
			// Each has a pool of its own, like a process of its own.
			db, err := sql.Open("postgres", b.servers.postgres)
			if err != nil {
				return 0, err
			}
			defer db.Close() //nolint:revive // at the end of the run
			db.SetMaxIdleConns(idleConns)
			box, err := outbox.New(db, outbox.Config{History: outbox.NoHistory, Logger: b.log})
			if err != nil {
				return 0, err
			}
			boxes[i] = box
			r, err := relay.New(box, watch, relay.Config{Logger: b.log, Window: scaleWindow, Lease: 6 * time.Second})
			if err != nil {
				return 0, err
			}
			go func() { stopped <- r.Run(run) }()
		}
		took, err := b.drainShared(ctx, n, boxes, watch)
		stop()
		for range count {
			err = errors.Join(err, <-stopped)
		}
		return perSecond(n, took), errors.Join(err, watch.failed(), sink.verdict())
	}}
}

const sharesText = `
select count(*)
from (select owner from oncemill.relay_leases where lane >= 0 and owner <> '' group by owner having count(*) = 32 / $1::int) s`

func (b *bench) drainShared(ctx context.Context, n int, boxes []*outbox.Outbox, watch *countingSink) (time.Duration, error) {
	count := len(boxes)
	for even := 0; even != count; {
		if err := b.db.QueryRowContext(ctx, sharesText, count).Scan(&even); err != nil {
			return 0, err
		}
		if err := pauseFor(ctx, 20*time.Millisecond); err != nil {
			return 0, fmt.Errorf("%d of %d workers have their share: %w", even, count, err)
		}
	}
	if err := b.loadOutbox(ctx, n); err != nil {
		return 0, err
	}
	begin := time.Now()
	for _, box := range boxes {
		box.Wake()
	}
	select {
	case <-watch.all:
		return time.Since(begin), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("%w with %d messages left", ctx.Err(), watch.left.Load())
	}
}

func pauseFor(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
