package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const (
	xminRate     = 2000 // messages a second
	xminEach     = 10   // in a transaction
	xminHeld     = 10 * time.Minute
	xminBaseline = time.Minute
)

// growthXmin relays a steady stream while a transaction, which has nothing to do
// with it, holds its snapshot all the time: what is deleted cannot be vacuumed.
func growthXmin(ctx context.Context, b *bench) ([]result, error) {
	const id = "growth-xmin"
	b.say("%-20s %v without a held transaction, then %v with one", id, xminBaseline, xminHeld)
	free, err := b.steady(ctx, xminBaseline, false)
	if err != nil {
		return nil, fmt.Errorf("%s: without: %w", id, err)
	}
	held, err := b.steady(ctx, xminHeld, true)
	if err != nil {
		return nil, fmt.Errorf("%s: held: %w", id, err)
	}
	what := fmt.Sprintf("%d messages a second, %d in a transaction, relayed for %v while a transaction is held open", xminRate, xminEach, xminHeld)
	against := fmt.Sprintf("the same for %v without one", xminBaseline)
	one := func(v float64) []float64 { return []float64{v} }
	return []result{
		compare(id, what+": delivered", against, "msg/s", ratioAtLeast(0.95), one(held.rate), one(free.rate)),
		compare(id+"-p99", what+": commit to confirm, 99th percentile", against, "ms", oursAtMost(250), one(held.p99), one(free.p99)),
		compare(id+"-dead", what+": most dead rows at a time", against, "rows", oursAtMost(300_000), one(held.dead), one(free.dead)),
	}, nil
}

// steadyRun is what a run of a steady stream shows.
type steadyRun struct {
	rate, p99, dead float64
}

func (b *bench) steady(ctx context.Context, duration time.Duration, held bool) (steadyRun, error) {
	n := int(duration.Seconds()) * xminRate
	if err := b.exec(ctx, "empty outbox", `truncate oncemill.outbox, oncemill.outbox_history`); err != nil {
		return steadyRun{}, err
	}
	if err := b.settle(ctx); err != nil {
		return steadyRun{}, err
	}
	if held {
		release, err := b.holdSnapshot(ctx)
		if err != nil {
			return steadyRun{}, err
		}
		defer release()
	}
	box, err := outbox.New(b.db, outbox.Config{History: outbox.NoHistory, Logger: b.log})
	if err != nil {
		return steadyRun{}, err
	}
	sink, watch := newLedgerSink(b.traffic, n), newStopwatch(b.traffic, n)
	r, err := relay.New(box, &timedSink{sink, watch}, relay.Config{Logger: b.log})
	if err != nil {
		return steadyRun{}, err
	}
	run, stop := context.WithCancel(ctx)
	defer stop()
	stopped, most := make(chan error, 1), make(chan float64, 1)
	go func() { stopped <- r.Run(run) }()
	go func() { most <- b.mostDead(run) }()
	begin := time.Now()
	err = watch.pace(ctx, xminRate, n, xminEach, b.publishTo(box))
	if err == nil {
		err = watch.await(ctx)
	}
	took := time.Since(begin)
	stop()
	dead := <-most
	// Producers here do not serialise on keys, so there is no order to keep.
	if err := errors.Join(err, <-stopped, sink.arrivals()); err != nil {
		return steadyRun{}, err
	}
	return steadyRun{rate: perSecond(n, took), p99: watch.quantiles(0, 0.99)[0], dead: dead}, nil
}

// holdSnapshot opens a transaction that keeps vacuum from removing anything.
func (b *bench) holdSnapshot(ctx context.Context) (release func(), err error) {
	conn, err := b.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	for _, text := range []string{`begin isolation level repeatable read`, `select pg_current_xact_id()`} {
		if _, err := conn.ExecContext(ctx, text); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	return func() {
		_, _ = conn.ExecContext(context.WithoutCancel(ctx), `rollback`)
		_ = conn.Close()
	}, nil
}

// mostDead returns the most dead rows of the outbox that it saw until ctx ended.
func (b *bench) mostDead(ctx context.Context) float64 {
	var most float64
	for pauseFor(ctx, time.Second) == nil {
		var dead float64
		err := b.db.QueryRowContext(ctx, `
select coalesce(sum(n_dead_tup), 0)
from pg_stat_user_tables
where schemaname = 'oncemill' and relname ~ '^outbox_[0-3]$'`).Scan(&dead)
		if err == nil {
			most = max(most, dead)
		}
	}
	return most
}
