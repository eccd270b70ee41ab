package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"runtime/pprof"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// findings are what one row found out and another one uses.
type findings struct {
	skipLockedBatch int
	forwarder       []result
}

// Backlogs of a run.
const (
	rabbitBacklog     = 100_000
	engineBacklog     = 200_000
	skipLockedBacklog = 200_000
	walBacklog        = 100_000
)

// prepare makes oncemill's tables.
func (b *bench) prepare(ctx context.Context) error {
	return oncemill.Migrate(ctx, b.db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations)
}

// drain runs a relay with its default settings until it has relayed the n
// messages of the outbox, and returns the time from before its start to the
// deletion of the last row.
func (b *bench) drain(ctx context.Context, n int, history bool, sink relay.Sink) (took time.Duration, err error) {
	return b.drainWith(ctx, n, history, sink, relay.Config{})
}

func (b *bench) drainWith(ctx context.Context, n int, history bool, sink relay.Sink, worker relay.Config) (took time.Duration, err error) {
	cfg := outbox.Config{History: outbox.NoHistory, Logger: b.log}
	if history {
		cfg.History = 24 * time.Hour
	}
	box, err := outbox.New(b.db, cfg)
	if err != nil {
		return 0, err
	}
	if history {
		// A relay has been running for long where there is a backlog: the
		// partitions of the history are there.
		if _, err := outboxqueue.Of(box).Maintain(ctx, always); err != nil {
			return 0, fmt.Errorf("drain: %w", err)
		}
	}
	counted := newCountingSink(sink, n)
	worker.Logger = b.log
	r, err := relay.New(box, counted, worker)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stopProfile, err := b.startProfile()
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- r.Run(ctx) }()
	select {
	case <-counted.all:
		err = b.awaitEmpty(ctx)
		took = time.Since(begin)
	case err := <-stopped:
		return 0, fmt.Errorf("drain: the relay stopped early: %w", err)
	case <-ctx.Done():
		err = ctx.Err()
	}
	stopProfile()
	if err != nil {
		err = fmt.Errorf("drain: %w with %d of %d messages left", err, counted.left.Load(), n)
	}
	cancel()
	return took, errors.Join(err, <-stopped, counted.failed(), b.checkDrained(context.WithoutCancel(ctx), n, history))
}

func always(context.Context, *sql.Tx) (bool, error) { return true, nil }

// Served by the primary keys (lane, id) of the partitions: a probe of each lane.
const outboxHasRows = `
select exists (
	select
	from generate_series(0, 31) as l (lane)
	cross join lateral (select from oncemill.outbox o where o.lane = l.lane order by o.id limit 1) m
)`

// awaitEmpty returns when the outbox is empty.
func (b *bench) awaitEmpty(ctx context.Context) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		var left bool
		if err := b.db.QueryRowContext(ctx, outboxHasRows).Scan(&left); err != nil || !left {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// checkDrained counts what is left in the outbox, and what is in the history.
func (b *bench) checkDrained(ctx context.Context, n int, history bool) error {
	var left, kept int
	if err := b.db.QueryRowContext(ctx, `select (select count(*) from oncemill.outbox), (select count(*) from oncemill.outbox_history)`).Scan(&left, &kept); err != nil {
		return fmt.Errorf("count rows: %w", err)
	}
	if !history {
		n = 0
	}
	if left != 0 || kept != n {
		return fmt.Errorf("the outbox holds %d rows, not 0, and the history %d, not %d", left, kept, n)
	}
	return nil
}

// startProfile begins the CPU profile of our side, if one was asked for. The
// latest run's stays.
func (b *bench) startProfile() (stop func(), err error) {
	if b.profile == "" {
		return func() {}, nil
	}
	file, err := os.Create(b.profile)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() {
		pprof.StopCPUProfile()
		if err := file.Close(); err != nil {
			b.say("CPU profile: %v", err)
		}
	}, nil
}

// oursToRabbitMQ drains a backlog into the queue.
func (b *bench) oursToRabbitMQ() side {
	return side{name: "ours", n: rabbitBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.loadOutbox(ctx, n); err != nil {
			return 0, err
		}
		if err := b.settled(ctx); err != nil {
			return 0, err
		}
		if err := b.freshQueue(); err != nil {
			return 0, err
		}
		sink, err := rabbitmq.New(b.topology(), rabbitmq.Config{Logger: b.log})
		if err != nil {
			return 0, err
		}
		took, err := b.drain(ctx, n, false, sink)
		if err != nil {
			return 0, err
		}
		return perSecond(n, took), b.verifyQueue(ctx, b.traffic, n, true)
	}}
}

// oursToNowhere drains a backlog into a sink that confirms at once.
func (b *bench) oursToNowhere() side {
	return side{name: "ours", n: engineBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.loadOutbox(ctx, n); err != nil {
			return 0, err
		}
		if err := b.settled(ctx); err != nil {
			return 0, err
		}
		sink := newLedgerSink(b.traffic, n)
		took, err := b.drain(ctx, n, false, sink)
		return perSecond(n, took), errors.Join(err, sink.verdict())
	}}
}
