package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

const (
	latencyRate     = 1000 // messages a second
	latencyMessages = 4000
	latencyWarm     = 1000 // of them, which do not count
	deadMessages    = 5000 // healthy ones
	deadTopics      = 100_000
	producers       = 8
)

// The values of a paced side.
const (
	p50 = iota
	p99
	delivered
)

// latency measures the time from a producer's commit to the broker's confirm. The floor
// publishes by itself as soon as its commit has returned. Beside dead topics, the relay has
// to find out about each of them while the stream goes on.
func latency() scenario {
	what := fmt.Sprintf("commit to confirm at %d transactions a second of one message each, %d of them, ", latencyRate, latencyMessages-latencyWarm)
	dead := fmt.Sprintf("%d healthy messages at %d a second beside %d messages of topics without a queue, committed before, ", deadMessages, latencyRate, deadTopics)
	return scenario{
		id: "latency", round: 26 * time.Second,
		sides: func(ctx context.Context, b *bench) ([]side, error) {
			if err := b.initForwarder(ctx); err != nil {
				return nil, err
			}
			fastest := forwarderSettings{pool: 8, batch: 100, poll: time.Millisecond}
			return []side{
				b.paced("ours, without dead topics", latencyMessages, latencyWarm, b.pacedRelay(b.log, nothing)),
				b.paced("the floor: a commit, and one raw confirmed publish after it", latencyMessages, latencyWarm, b.pacedFloor),
				b.paced(fastest.String(), latencyMessages, latencyWarm, b.pacedForwarder(fastest)),
				b.paced("ours, beside dead topics", deadMessages, 0, b.pacedRelay(slog.New(slog.NewTextHandler(io.Discard, nil)), publishDeadTopics)),
			}, nil
		},
		rows: []row{
			{"latency-p50", what + "median", figure{0, p50}, figure{1, p50}, "ms", atMost(2)},
			{"latency-p99", what + "99th percentile", figure{0, p99}, figure{1, p99}, "ms", atMost(3)},
			{"latency-forwarder-p50", what + "median", figure{0, p50}, figure{2, p50}, "ms", atMost(1)},
			{"latency-forwarder-p99", what + "99th percentile", figure{0, p99}, figure{2, p99}, "ms", atMost(1)},
			{"dead-topics", dead + "delivered", figure{3, delivered}, figure{0, delivered}, "msg/s", atLeast(0.95)},
			{"dead-topics-p99", dead + "commit to confirm, 99th percentile", figure{3, p99}, figure{0, p99}, "ms", oursAtMost(1000)},
		},
	}
}

// pacedRun is what a paced side does: commit messages, and confirm each to the stopwatch.
type pacedRun struct {
	commit func(ctx context.Context, first, end int) error
	stop   func() error
}

// paced is a side to whose queue messages are committed one at a time, at latencyRate.
func (b *bench) paced(name string, n, warm int, start func(ctx context.Context, watch *stopwatch) (pacedRun, error)) side {
	return side{name: name, n: n, fixed: true, run: func(ctx context.Context, n int) (values, error) {
		if err := b.freshQueue(); err != nil {
			return nil, err
		}
		watch := newStopwatch(b.traffic, n)
		if err := watch.time(ctx, latencyRate, 1, start); err != nil {
			return nil, err
		}
		q := watch.quantiles(min(warm, n/2), 0.5, 0.99)
		// Producers here do not serialise on keys, so there is no order to keep.
		return values{q[0], q[1], watch.rate()}, b.verifyQueue(ctx, b.traffic, n, false)
	}}
}

func nothing(context.Context, *outbox.Outbox, int) error { return nil }

// pacedRelay publishes through the outbox while a relay runs in the same process, once
// what is beside that has been put into the outbox.
func (b *bench) pacedRelay(log *slog.Logger, beside func(ctx context.Context, box *outbox.Outbox, n int) error) func(context.Context, *stopwatch) (pacedRun, error) {
	return func(ctx context.Context, watch *stopwatch) (pacedRun, error) {
		box, err := b.fresh(ctx, noHistory)
		if err == nil {
			err = b.settle(ctx)
		}
		if err == nil {
			err = beside(ctx, box, len(watch.confirmed))
		}
		if err != nil {
			return pacedRun{}, err
		}
		sink, err := rabbitmq.New(b.topology(), rabbitmq.Config{Logger: log})
		if err != nil {
			return pacedRun{}, err
		}
		return b.timedRelay(ctx, box, sink, relay.Config{Logger: log}, watch)
	}
}

// timedRelay runs a relay whose sink reports to the stopwatch.
func (b *bench) timedRelay(ctx context.Context, box *outbox.Outbox, sink relay.Sink, cfg relay.Config, watch *stopwatch) (pacedRun, error) {
	stop, err := b.startRelay(ctx, box, &watchedSink{Sink: sink, confirmed: func(m *relay.Message) { watch.confirm(m.MessageID) }}, cfg)
	return pacedRun{stop: stop, commit: func(ctx context.Context, first, end int) error {
		return publishSome(ctx, box, first, end, watch.traffic.message)
	}}, err
}

// publishDeadTopics makes as large a share of the dead topics as n is of the messages.
func publishDeadTopics(ctx context.Context, box *outbox.Outbox, n int) error {
	const each = deadTopics / deadMessages
	dead := func(i int) (string, *message.Message) {
		return "bench.reply." + strconv.Itoa(i), message.NewMessage("dead-"+strconv.Itoa(i), make([]byte, payloadSize))
	}
	const chunk = 50
	return inTurn(ctx, producers, n/chunk, func(ctx context.Context, i int) error {
		return publishSome(ctx, box, i*chunk*each, (i+1)*chunk*each, dead)
	})
}

// pacedFloor commits a row of a plain table, and then publishes with amqp091-go alone and
// awaits the confirm, on as many channels as there are producers.
func (b *bench) pacedFloor(ctx context.Context, watch *stopwatch) (pacedRun, error) {
	err := b.exec(ctx, "empty table", `create table if not exists bench_floor (id text primary key, payload bytea not null)`, `truncate bench_floor`)
	if err == nil {
		err = b.settle(ctx)
	}
	if err != nil {
		return pacedRun{}, err
	}
	committed := make(chan int, len(watch.confirmed))
	group, ctx := errgroup.WithContext(ctx)
	for range producers {
		group.Go(func() error {
			return b.withChannel(func(ch *amqp.Channel) error {
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
		})
	}
	stop := func() error {
		close(committed)
		return group.Wait()
	}
	return pacedRun{stop: stop, commit: func(ctx context.Context, i, _ int) error {
		err := inTx(ctx, b.db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into bench_floor values ($1, $2)`, b.traffic.id(i), b.traffic.payload(i))
			return err
		})
		if err == nil {
			committed <- i
		}
		return err
	}}, nil
}

// pacedForwarder publishes through Watermill's SQL publisher in the same way while the
// forwarder runs.
func (b *bench) pacedForwarder(s forwarderSettings) func(ctx context.Context, watch *stopwatch) (pacedRun, error) {
	return func(ctx context.Context, watch *stopwatch) (pacedRun, error) {
		err := b.exec(ctx, "empty table", forwarderReset)
		if err == nil {
			err = b.settle(ctx)
		}
		if err != nil {
			return pacedRun{}, err
		}
		stop, err := b.startForwarder(ctx, s, watch.confirm)
		return pacedRun{stop: stop, commit: func(ctx context.Context, i, _ int) error {
			return inTx(ctx, b.db, func(tx *sql.Tx) error {
				publisher, err := watermillsql.NewPublisher(tx, watermillsql.PublisherConfig{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
				if err != nil {
					return err
				}
				topic, msg := b.traffic.message(i)
				return forwarder.NewPublisher(publisher, forwarder.PublisherConfig{ForwarderTopic: forwarderTopic}).Publish(topic, msg)
			})
		}}, err
	}
}

// stopwatch takes, for each message of the traffic, the time from its commit to its
// confirm.
type stopwatch struct {
	*countdown
	traffic              *traffic
	committed, confirmed []atomic.Int64 // nanoseconds since 1970
}

func newStopwatch(t *traffic, n int) *stopwatch {
	return &stopwatch{newCountdown(n), t, make([]atomic.Int64, n), make([]atomic.Int64, n)}
}

// confirm is called when the broker has a message.
func (s *stopwatch) confirm(id string) {
	i, err := s.traffic.index(id)
	if err == nil && i < len(s.confirmed) && s.confirmed[i].CompareAndSwap(0, time.Now().UnixNano()) {
		s.count()
	}
}

// time commits the messages, rate of them a second, each of so many in a transaction when
// it is due, whatever became of the ones before, and waits for the confirms.
func (s *stopwatch) time(ctx context.Context, rate, each int, start func(ctx context.Context, watch *stopwatch) (pacedRun, error)) error {
	run, err := start(ctx, s)
	if err != nil {
		return err
	}
	begin, n := time.Now(), len(s.committed)
	err = inTurn(ctx, producers, (n+each-1)/each, func(ctx context.Context, transaction int) error {
		first, end := transaction*each, min((transaction+1)*each, n)
		if err := pauseFor(ctx, time.Until(begin.Add(time.Duration(first)*time.Second/time.Duration(rate)))); err != nil {
			return err
		}
		if err := run.commit(ctx, first, end); err != nil {
			return fmt.Errorf("commit message %d: %w", first, err)
		}
		now := time.Now().UnixNano()
		for i := first; i < end; i++ {
			s.committed[i].Store(now)
		}
		return nil
	})
	if err == nil {
		err = s.await(ctx)
	}
	return errors.Join(err, run.stop())
}

// quantiles returns the times of the messages from first on that the given shares of them
// do not exceed, in milliseconds. A confirm may come before the commit has returned to the
// producer.
func (s *stopwatch) quantiles(first int, shares ...float64) []float64 {
	var all []int64
	for i := first; i < len(s.confirmed); i++ {
		all = append(all, max(0, s.confirmed[i].Load()-s.committed[i].Load()))
	}
	slices.Sort(all)
	out := make([]float64, len(shares))
	for i, share := range shares {
		out[i] = float64(all[int(share*float64(len(all)-1))]) / 1e6
	}
	return out
}

// rate returns the messages a second from the first commit to the last confirm.
func (s *stopwatch) rate() float64 {
	begin, end := s.committed[0].Load(), int64(0)
	for i := range s.confirmed {
		begin, end = min(begin, s.committed[i].Load()), max(end, s.confirmed[i].Load())
	}
	return perSecond(len(s.confirmed), time.Duration(end-begin))[0]
}
