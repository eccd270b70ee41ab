package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

const (
	latencyRate     = 1000 // messages a second
	latencyMessages = 6000
	latencyWarm     = 1000 // of them, which do not count
)

// latency measures the time from a producer's commit to the broker's confirm, one
// message a transaction, against the floor, which publishes by itself as soon as its
// commit has returned, and against Watermill's forwarder at its fastest poll.
func latency(ctx context.Context, b *bench) ([]result, error) {
	const unit = "ms"
	if err := initForwarder(ctx, b.db); err != nil {
		return nil, err
	}
	if err := b.exec(ctx, "make the floor's table", floorTable); err != nil {
		return nil, err
	}
	var quantiles [3][2][]float64 // side, p50 or p99, rounds
	timed := func(at int, name string, run func(ctx context.Context, n int) (*stopwatch, error)) side {
		return side{name: name, n: latencyMessages, run: func(ctx context.Context, n int) (float64, error) {
			if n < latencyMessages { // the warm-up
				n = 2 * latencyWarm
			}
			watch, err := run(ctx, n)
			if err != nil {
				return 0, err
			}
			q := watch.quantiles(latencyWarm, 0.5, 0.99)
			if n == latencyMessages {
				quantiles[at][0], quantiles[at][1] = append(quantiles[at][0], q[0]), append(quantiles[at][1], q[1])
			}
			return q[1], nil
		}}
	}
	fastest := forwarderSettings{pool: 8, batch: 100, poll: time.Millisecond}
	_, err := b.rounds(ctx, "latency", unit+" p99",
		timed(0, "ours", b.oursPaced(latencyRate, nothing)),
		timed(1, "floor", b.floorPaced(latencyRate)),
		timed(2, "forwarder, "+fastest.String(), b.forwarderPaced(latencyRate, fastest)))
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("commit to confirm at %d transactions a second of one message each, %d of them", latencyRate, latencyMessages-latencyWarm)
	const floor = "the floor: a commit, and one raw confirmed publish after it"
	against := "Watermill's forwarder, " + fastest.String()
	return []result{
		compare("latency-p50", what+", median", floor, unit, ratioAtMost(2), quantiles[0][0], quantiles[1][0]),
		compare("latency-p99", what+", 99th percentile", floor, unit, ratioAtMost(3), quantiles[0][1], quantiles[1][1]),
		compare("latency-forwarder-p50", what+", median", against, unit, oursAtMost(5), quantiles[0][0], quantiles[2][0]),
		compare("latency-forwarder-p99", what+", 99th percentile", against, unit, oursAtMost(25), quantiles[0][1], quantiles[2][1]),
	}, nil
}

const floorTable = `create table if not exists public.bench_floor (id text primary key, payload bytea not null)`

// floorPaced commits a row of a plain table, and then publishes with amqp091-go alone
// and awaits the confirm, on as many channels as there are producers.
func (b *bench) floorPaced(rate int) func(ctx context.Context, n int) (*stopwatch, error) {
	return func(ctx context.Context, n int) (*stopwatch, error) {
		if err := b.exec(ctx, "empty table", `truncate public.bench_floor`); err != nil {
			return nil, err
		}
		if err := b.settle(ctx); err != nil {
			return nil, err
		}
		if err := b.freshQueue(); err != nil {
			return nil, err
		}
		watch := newStopwatch(b.traffic, n)
		committed := make(chan int, n)
		group, working := errgroup.WithContext(ctx)
		for range producers {
			group.Go(func() error { return b.publishCommitted(working, committed, watch) })
		}
		err := watch.pace(working, rate, n, 1, func(ctx context.Context, i, _ int) error {
			tx, err := b.db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback() //nolint:errcheck // a no-op after the commit
			if _, err := tx.ExecContext(ctx, `insert into public.bench_floor values ($1, $2)`, b.traffic.id(i), b.traffic.payload(i)); err != nil {
				return err
			}
			if err := tx.Commit(); err != nil {
				return err
			}
			committed <- i
			return nil
		})
		close(committed)
		if err := errors.Join(err, group.Wait()); err != nil {
			return nil, err
		}
		return watch, b.verifyQueue(ctx, b.traffic, n, false)
	}
}

// publishCommitted publishes messages one after the other on a channel of its own.
func (b *bench) publishCommitted(ctx context.Context, committed <-chan int, watch *stopwatch) error {
	return withChannel(b.servers.amqp, func(ch *amqp091.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return fmt.Errorf("confirm mode: %w", err)
		}
		for i := range committed {
			dc, err := ch.PublishWithDeferredConfirm("", queueName, true, false, rawPublishing(b.traffic, i, time.Now()))
			if err != nil {
				return fmt.Errorf("publish: %w", err)
			}
			if err := confirmed(ctx, dc); err != nil {
				return err
			}
			watch.confirm(b.traffic.id(i))
		}
		return nil
	})
}

// nothing happens beside a run.
func nothing(context.Context, *outbox.Outbox) error { return nil }

// oursPaced publishes through the outbox while a relay runs in the same process, once
// what is beside that has been put into the outbox.
func (b *bench) oursPaced(rate int, beside func(ctx context.Context, box *outbox.Outbox) error) func(ctx context.Context, n int) (*stopwatch, error) {
	return func(ctx context.Context, n int) (*stopwatch, error) {
		if err := b.exec(ctx, "empty outbox", `truncate oncemill.outbox, oncemill.outbox_history, oncemill.parked`); err != nil {
			return nil, err
		}
		if err := b.settle(ctx); err != nil {
			return nil, err
		}
		if err := b.freshQueue(); err != nil {
			return nil, err
		}
		box, err := outbox.New(b.db, outbox.Config{History: outbox.NoHistory, Logger: b.log})
		if err != nil {
			return nil, err
		}
		sink, err := rabbitmq.New(b.topology(), rabbitmq.Config{Logger: b.log})
		if err != nil {
			return nil, err
		}
		if err := beside(ctx, box); err != nil {
			return nil, err
		}
		watch := newStopwatch(b.traffic, n)
		r, err := relay.New(box, &timedSink{sink, watch}, relay.Config{Logger: b.log})
		if err != nil {
			return nil, err
		}
		run, stop := context.WithCancel(ctx)
		defer stop()
		stopped := make(chan error, 1)
		go func() { stopped <- r.Run(run) }()
		err = watch.pace(ctx, rate, n, 1, b.publishTo(box))
		if err == nil {
			err = watch.await(ctx)
		}
		stop()
		if err := errors.Join(err, <-stopped); err != nil {
			return nil, err
		}
		// Producers here do not serialise on keys, so there is no order to keep.
		return watch, b.verifyQueue(ctx, b.traffic, n, false)
	}
}

// publishTo publishes some messages in a transaction.
func (b *bench) publishTo(box *outbox.Outbox) func(ctx context.Context, first, end int) error {
	return func(ctx context.Context, first, end int) error {
		return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			msgs := make([]*message.Message, 0, end-first)
			for i := first; i < end; i++ {
				msg := message.NewMessage(b.traffic.id(i), b.traffic.payload(i))
				outbox.SetKey(msg, b.traffic.key(i))
				msgs = append(msgs, msg)
			}
			return box.Publish(ctx, tx, topic, msgs...)
		})
	}
}

// forwarderPaced publishes through Watermill's SQL publisher in the same way while
// the forwarder runs.
func (b *bench) forwarderPaced(rate int, s forwarderSettings) func(ctx context.Context, n int) (*stopwatch, error) {
	return func(ctx context.Context, n int) (*stopwatch, error) {
		if err := b.exec(ctx, "empty table", forwarderReset); err != nil {
			return nil, err
		}
		if err := b.settle(ctx); err != nil {
			return nil, err
		}
		if err := b.freshQueue(); err != nil {
			return nil, err
		}
		watch := newStopwatch(b.traffic, n)
		stop, err := startForwarder(ctx, b.db, b.topology(), s, watch)
		if err != nil {
			return nil, err
		}
		err = watch.pace(ctx, rate, n, 1, func(ctx context.Context, i, _ int) error {
			tx, err := b.db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback() //nolint:errcheck // a no-op after the commit
			publisher, err := watermillsql.NewPublisher(tx, watermillsql.PublisherConfig{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
			if err != nil {
				return err
			}
			wrapped := forwarder.NewPublisher(publisher, forwarder.PublisherConfig{ForwarderTopic: forwarderTopic})
			msg := message.NewMessage(b.traffic.id(i), b.traffic.payload(i))
			msg.Metadata.Set(outbox.KeyMetadata, b.traffic.key(i))
			if err := wrapped.Publish(topic, msg); err != nil {
				return err
			}
			return tx.Commit()
		})
		if err == nil {
			err = watch.await(ctx)
		}
		if err := errors.Join(err, stop()); err != nil {
			return nil, err
		}
		return watch, b.verifyQueue(ctx, b.traffic, n, false)
	}
}

// startForwarder runs Watermill's forwarder daemon until stop is called.
func startForwarder(ctx context.Context, db *sql.DB, cfg amqp.Config, s forwarderSettings, watch *stopwatch) (stop func() error, err error) {
	cfg.Publish.ConfirmDelivery = true
	cfg.Publish.Mandatory = true
	cfg.Publish.ChannelPoolSize = s.pool
	publisher, err := amqp.NewPublisher(cfg, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("forwarder: publisher: %w", err)
	}
	subscriber, err := newForwarderSubscriber(db, s)
	if err != nil {
		return nil, fmt.Errorf("forwarder: subscriber: %w", err)
	}
	daemon, err := forwarder.NewForwarder(subscriber, &timedPublisher{publisher, watch}, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: forwarderTopic})
	if err != nil {
		return nil, fmt.Errorf("forwarder: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() { stopped <- daemon.Run(ctx) }()
	select {
	case <-daemon.Running():
	case err := <-stopped:
		cancel()
		return nil, fmt.Errorf("forwarder: stopped early: %w", err)
	}
	return func() error {
		defer cancel()
		return errors.Join(daemon.Close(), <-stopped, publisher.Close())
	}, nil
}

// timedPublisher reports confirms to a stopwatch.
type timedPublisher struct {
	message.Publisher
	watch *stopwatch
}

func (p *timedPublisher) Publish(topic string, messages ...*message.Message) error {
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	for _, m := range messages {
		p.watch.confirm(m.UUID)
	}
	return nil
}
