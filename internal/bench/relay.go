package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// Backlogs of a run.
const (
	rabbitBacklog = 100_000
	hotkeyBacklog = 50_000
	engineBacklog = 200_000
	walBacklog    = 100_000
	scaleBacklog  = 30_000
)

// noHistory is how every row but one runs: what is delivered is deleted.
var noHistory = outbox.Config{History: outbox.NoHistory}

// toRabbitMQ drains a backlog from PostgreSQL to RabbitMQ.
func toRabbitMQ() scenario {
	const unit = "msg/s"
	what := "relay drains a backlog from PostgreSQL to RabbitMQ, in order per key, no history"
	return scenario{
		id: "relay-rabbitmq", find: 25 * time.Second, round: 22 * time.Second,
		sides: func(ctx context.Context, b *bench) ([]side, error) {
			raw, err := b.raw(ctx)
			if err != nil {
				return nil, err
			}
			best, stock, err := b.forwarders(ctx)
			return []side{
				b.oursToRabbitMQ(b.traffic, rabbitBacklog, relay.Config{}), raw, best, stock,
				b.oursToRabbitMQ(newTraffic(1), hotkeyBacklog, relay.Config{Order: relay.OrderPerKeyPipelined}),
			}, err
		},
		rows: []row{
			{"relay-rabbitmq", what, figure{0, 0}, figure{1, 0}, unit, atLeast(0.95)},
			{"relay-vs-forwarder", what, figure{0, 0}, figure{2, 0}, unit, atLeast(10)},
			{"relay-vs-forwarder-default", what, figure{0, 0}, figure{3, 0}, unit, atLeast(25)},
			{"relay-hotkey", "the same with a single key, in a pipeline", figure{4, 0}, figure{1, 0}, unit, atLeast(0.8)},
		},
	}
}

func (b *bench) oursToRabbitMQ(t *traffic, n int, cfg relay.Config) side {
	return side{name: "ours", n: n, run: func(ctx context.Context, n int) (values, error) {
		box, err := b.loaded(ctx, noHistory, t, n)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(b.settled(ctx), b.freshQueue()); err != nil {
			return nil, err
		}
		sink, err := rabbitmq.New(b.topology(), rabbitmq.Config{Logger: b.log})
		if err != nil {
			return nil, err
		}
		took, err := b.drain(ctx, box, n, sink, cfg)
		if err != nil {
			return nil, err
		}
		return perSecond(n, took), b.verifyQueue(ctx, t, n, true)
	}}
}

// engine drains a backlog into a sink that confirms at once.
func engine() scenario {
	const unit = "msg/s"
	what := "relay drains a backlog into a sink that confirms at once, deletes included, no history"
	return scenario{
		id: "relay-engine", find: 7 * time.Second, round: 12 * time.Second,
		sides: func(ctx context.Context, b *bench) ([]side, error) {
			loop, err := best(ctx, b, []int{100, 500, 2000}, engineBacklog/8, engineBacklog, b.skipLocked)
			return []side{b.oursToNowhere(), b.copyOut(), loop}, err
		},
		rows: []row{
			{"relay-engine", what, figure{0, 0}, figure{1, 0}, unit, atLeast(0.3)},
			{"relay-vs-skiplocked", what, figure{0, 0}, figure{2, 0}, unit, atLeast(2.5)},
		},
	}
}

func (b *bench) oursToNowhere() side {
	return side{name: "ours", n: engineBacklog, run: func(ctx context.Context, n int) (values, error) {
		box, err := b.loaded(ctx, noHistory, b.traffic, n)
		if err = errors.Join(err, b.settled(ctx)); err != nil {
			return nil, err
		}
		sink := newLedgerSink(b.traffic, n)
		took, err := b.drain(ctx, box, n, sink, relay.Config{})
		return perSecond(n, took), errors.Join(err, sink.check(true))
	}}
}

// The columns that a relay needs, in no order: the fastest way out of PostgreSQL.
const copyOut = `copy (
	select lane, id, topic, message_id, key, payload, metadata, created_at
	from oncemill.outbox
) to stdout (format binary)`

func (b *bench) copyOut() side {
	return side{name: "binary COPY of the same rows to the client (pgx)", n: engineBacklog, run: func(ctx context.Context, n int) (values, error) {
		_, err := b.loaded(ctx, noHistory, b.traffic, n)
		if err = errors.Join(err, b.settled(ctx)); err != nil {
			return nil, err
		}
		conn, err := pgx.Connect(ctx, b.postgres)
		if err != nil {
			return nil, fmt.Errorf("copy: %w", err)
		}
		defer conn.Close(ctx)
		var received byteCounter
		begin := time.Now()
		tag, err := conn.PgConn().CopyTo(ctx, &received, copyOut)
		took := time.Since(begin)
		if err != nil {
			return nil, fmt.Errorf("copy: %w", err)
		}
		if tag.RowsAffected() != int64(n) || int(received) < n*payloadSize {
			return nil, fmt.Errorf("copy: got %d rows with %d bytes, not %d rows", tag.RowsAffected(), received, n)
		}
		return perSecond(n, took), nil
	}}
}

type byteCounter int

func (c *byteCounter) Write(p []byte) (int, error) {
	*c += byteCounter(len(p))
	return len(p), nil
}

// wal counts the bytes of write-ahead log that relaying a message costs. VACUUM and
// CHECKPOINT come before the backlog is loaded, as most messages live shorter than a
// checkpoint interval: the first change of a page after a checkpoint would log the whole
// page, on both sides.
func wal() scenario {
	const unit = "B/msg"
	what := fmt.Sprintf("write-ahead log for relaying %d messages that were committed after the latest checkpoint, autovacuum off on the tables, ", walBacklog)
	return scenario{
		id: "relay-wal", round: 9 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			const batch = 500 // 983 bytes; with 2,000 it is 986
			return []side{
				b.oursWAL("ours", noHistory, 0),
				b.oursWAL("ours, with history", outbox.Config{History: 24 * time.Hour}, 1),
				b.walOf(skipLockedName(batch), `skiplocked`, func(ctx context.Context, n int) (func() error, error) {
					return func() error {
						_, err := b.drainSkipLocked(ctx, n, batch)
						return err
					}, b.loadSkipLocked(ctx, n)
				}),
			}, nil
		},
		rows: []row{
			{"relay-wal", what + "no history", figure{0, 0}, figure{2, 0}, unit, atMost(0.1)},
			{"relay-wal-history", what + "with history", figure{1, 0}, figure{2, 0}, unit, atMost(0.9)},
		},
	}
}

// oursWAL keeps so many rows of each message in the history.
func (b *bench) oursWAL(name string, cfg outbox.Config, kept int) side {
	return b.walOf(name, `oncemill.outbox`, func(ctx context.Context, n int) (func() error, error) {
		box, err := b.loaded(ctx, cfg, b.traffic, n)
		sink := newLedgerSink(b.traffic, n)
		return func() error {
			_, err := b.drain(ctx, box, n, sink, relay.Config{})
			return errors.Join(err, sink.check(true), b.expectRows(ctx, kept*n, `select count(*) from oncemill.outbox_history`))
		}, err
	})
}

// walOf is a side that fills a table, and then counts what draining it adds to the log.
func (b *bench) walOf(name, table string, fill func(ctx context.Context, n int) (drain func() error, err error)) side {
	return side{name: name, n: walBacklog, fixed: true, run: func(ctx context.Context, n int) (values, error) {
		if err := b.exec(ctx, "start of the log", skipLockedTable, fmt.Sprintf(setAutovacuum, table, `set (autovacuum_enabled = off)`), `truncate `+table, `vacuum`, `checkpoint`); err != nil {
			return nil, err
		}
		drain, err := fill(ctx, n)
		if err != nil {
			return nil, err
		}
		var before string
		if err := b.db.QueryRowContext(ctx, `select pg_current_wal_insert_lsn()::text`).Scan(&before); err != nil {
			return nil, fmt.Errorf("read position of the log: %w", err)
		}
		if err := drain(); err != nil {
			return nil, err
		}
		var added float64
		if err := b.db.QueryRowContext(ctx, `select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::pg_lsn)::float8`, before).Scan(&added); err != nil {
			return nil, fmt.Errorf("read position of the log: %w", err)
		}
		return values{added / float64(n)}, b.exec(ctx, "restore", fmt.Sprintf(setAutovacuum, table, `reset (autovacuum_enabled)`))
	}}
}

// Only partitions without partitions have rows, and take the setting.
const setAutovacuum = `
do $$
declare leaf regclass;
begin
	for leaf in select relid from pg_partition_tree('%s') where isleaf loop
		execute format('alter table %%s %s', leaf);
	end loop;
end $$`

// scaleOut has workers whose limit is the latency of the sink.
func scaleOut() scenario {
	const unit = "msg/s"
	what := fmt.Sprintf("workers, %d in flight each, drain a backlog into a sink that confirms after %v", scaleWindow, sinkLatency)
	return scenario{
		id: "scale-out", round: 8 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			return []side{b.workers(1), b.workers(2), b.workers(4)}, nil
		},
		rows: []row{
			{"scale-out-2", "2 " + what, figure{1, 0}, figure{0, 0}, unit, atLeast(1.9)},
			{"scale-out-4", "4 " + what, figure{2, 0}, figure{0, 0}, unit, atLeast(3.6)},
		},
	}
}

const (
	scaleWindow = 32
	sinkLatency = 5 * time.Millisecond
)

// workers is a side of workers that have shared the lanes before the backlog is
// committed.
func (b *bench) workers(count int) side {
	// Each drains for about the same time.
	return side{name: []string{1: "one worker", 2: "two workers", 4: "four workers"}[count], n: scaleBacklog * count / 4, run: func(ctx context.Context, n int) (values, error) {
		if _, err := b.fresh(ctx, noHistory); err != nil {
			return nil, err
		}
		sink, left := newLedgerSink(b.traffic, n), newCountdown(n)
		sink.delay = sinkLatency
		watched := &watchedSink{Sink: sink, confirmed: func(*relay.Message) { left.count() }}
		var pools []*sql.DB
		for range count { // like a process each
			db, err := b.open(idleConns, "")
			if err != nil {
				return nil, err
			}
			defer db.Close() //nolint:revive // at the end of the run
			pools = append(pools, db)
		}
		boxes, stop, err := b.startWorkers(ctx, pools, watched, relay.Config{Window: scaleWindow, Lease: 6 * time.Second})
		if err != nil {
			return nil, err
		}
		// Committed at once, so that no worker begins before the others.
		err = publishSome(ctx, boxes[0], 0, n, b.traffic.message)
		begin := time.Now()
		if err == nil {
			for _, box := range boxes {
				box.Wake()
			}
			err = left.await(ctx)
		}
		v := perSecond(n, time.Since(begin))
		return v, errors.Join(err, stop(), watched.failed(), sink.check(true))
	}}
}

const shares = `
select count(*)
from (select owner from oncemill.relay_leases where lane >= 0 and owner <> '' group by owner having count(*) = 32 / $1::int) s`

// startWorkers runs a relay on each pool and returns when they have equal shares of the
// lanes.
func (b *bench) startWorkers(ctx context.Context, pools []*sql.DB, sink relay.Sink, cfg relay.Config) (boxes []*outbox.Outbox, stop func() error, err error) {
	var stops []func() error
	stop = func() error {
		errs := make([]error, len(stops))
		var stopping sync.WaitGroup
		for i, stop := range stops {
			stopping.Go(func() { errs[i] = stop() })
		}
		stopping.Wait()
		return errors.Join(errs...)
	}
	for _, db := range pools {
		box, err := outbox.New(db, outbox.Config{History: outbox.NoHistory, Logger: b.log})
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		one, err := b.startRelay(ctx, box, sink, cfg)
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		boxes, stops = append(boxes, box), append(stops, one)
	}
	for even := 0; even != len(pools) && err == nil; {
		if err = b.db.QueryRowContext(ctx, shares, len(pools)).Scan(&even); err == nil {
			err = pauseFor(ctx, 20*time.Millisecond)
		}
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("await equal shares of the lanes: %w", err), stop())
	}
	return boxes, stop, nil
}
