package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const (
	grownBacklog = 5_000_000
	grownDrained = 50_000
	grownIDs     = 10_000_000 // of a week with 16 messages a second
	grownKeys    = 5_000_000

	xminRate     = 2000 // messages a second
	xminEach     = 10   // in a transaction
	xminHeld     = 10 * time.Minute
	xminBaseline = time.Minute
)

const grownSchema = "oncemill_grown"

// grown makes tables that are loaded once and grow no further, next to the usual ones.
func (b *bench) grown(ctx context.Context, load ...string) error {
	drop := func(ctx context.Context) error {
		return b.exec(ctx, "drop grown tables", `drop schema if exists `+grownSchema+` cascade`)
	}
	if err := errors.Join(drop(ctx), b.migrate(ctx, grownSchema)); err != nil {
		return err
	}
	b.atEnd(func() error { return drop(context.WithoutCancel(ctx)) })
	b.progress.say("loading")
	return b.exec(ctx, "load", append(load, `vacuum (analyze)`)...)
}

// growthBacklog drains the oldest of a large backlog.
func growthBacklog() scenario {
	return scenario{
		id: "growth-backlog", long: true, round: 60 * time.Second,
		sides: func(ctx context.Context, b *bench) ([]side, error) {
			if err := b.grown(ctx); err != nil {
				return nil, err
			}
			cfg := outbox.Config{History: outbox.NoHistory, Database: oncemill.Config{Schema: grownSchema}, Logger: b.log}
			large, err := outbox.New(b.db, cfg)
			if err != nil {
				return nil, err
			}
			// Enough for all runs, so that as many are behind in the last one.
			err = publishAll(ctx, large, grownBacklog+(b.pairs+1)*grownDrained, b.traffic.message)
			return []side{
				b.drainingSome("ours, 5,000,000 messages behind", func(context.Context) (*outbox.Outbox, error) { return large, nil }),
				b.drainingSome(fmt.Sprintf("ours, %d behind", grownDrained), func(ctx context.Context) (*outbox.Outbox, error) {
					return b.loaded(ctx, noHistory, b.traffic, 2*grownDrained)
				}),
			}, err
		},
		rows: []row{{
			"growth-backlog", fmt.Sprintf("relay drains %d messages into a sink that confirms at once, with 5,000,000 behind", grownDrained),
			figure{0, 0},
			figure{1, 0},
			"msg/s", atLeast(0.9),
		}},
	}
}

// drainingSome is a side that drains the first messages of an outbox.
func (b *bench) drainingSome(name string, fill func(ctx context.Context) (*outbox.Outbox, error)) side {
	return side{name: name, n: grownDrained, fixed: true, run: func(ctx context.Context, n int) (values, error) {
		box, err := fill(ctx)
		if err = errors.Join(err, b.settle(ctx)); err != nil {
			return nil, err
		}
		left := newCountdown(n)
		sink := &watchedSink{Sink: confirmingSink{}, confirmed: func(*relay.Message) { left.count() }}
		begin := time.Now()
		stop, err := b.startRelay(ctx, box, sink, relay.Config{})
		if err != nil {
			return nil, err
		}
		err = left.await(ctx)
		took := time.Since(begin)
		return perSecond(n, took), errors.Join(err, stop(), sink.failed())
	}}
}

// confirmingSink confirms what is only a part of the traffic.
type confirmingSink struct{}

func (confirmingSink) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (confirmingSink) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	for _, m := range msgs {
		done(m, nil)
	}
}

// growthXmin relays a steady stream while a transaction, which has nothing to do with it,
// holds its snapshot all the time: what is deleted cannot be vacuumed.
func growthXmin() scenario {
	what := fmt.Sprintf("%d messages a second, %d in a transaction, relayed for %v while a transaction is held open: ", xminRate, xminEach, xminHeld)
	return scenario{
		id: "growth-xmin", long: true, once: true, round: 11 * time.Minute,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			return []side{b.steady("held", xminHeld, true), b.steady("the same for a minute without one", xminBaseline, false)}, nil
		},
		rows: []row{
			{"growth-xmin", what + "delivered", figure{0, delivered}, figure{1, delivered}, "msg/s", atLeast(0.95)},
			{"growth-xmin-p99", what + "commit to confirm, 99th percentile", figure{0, p99}, figure{1, p99}, "ms", atMost(25)},
			{"growth-xmin-dead", what + "most dead rows at a time, of all that were deleted", figure{0, dead}, figure{0, deleted}, "rows", atMost(0.25)},
		},
	}
}

// The values of a steady side, after those of a paced one.
const (
	dead = delivered + 1 + iota
	deleted
)

func (b *bench) steady(name string, duration time.Duration, held bool) side {
	return side{name: name, n: int(duration.Seconds()) * xminRate, fixed: true, run: func(ctx context.Context, n int) (values, error) {
		box, err := b.fresh(ctx, noHistory)
		if err = errors.Join(err, b.settle(ctx)); err != nil {
			return nil, err
		}
		if held {
			release, err := b.holdSnapshot(ctx)
			if err != nil {
				return nil, err
			}
			defer release()
		}
		sink, watch := newLedgerSink(b.traffic, n), newStopwatch(b.traffic, n)
		counting, stop := context.WithCancel(ctx)
		most := make(chan float64, 1)
		go func() { most <- b.mostDead(counting) }()
		err = watch.time(ctx, xminRate, xminEach, func(ctx context.Context, watch *stopwatch) (pacedRun, error) {
			return b.timedRelay(ctx, box, sink, relay.Config{}, watch)
		})
		stop()
		greatest := <-most
		// Producers here do not serialise on keys, so there is no order to keep.
		if err := errors.Join(err, sink.check(false)); err != nil {
			return nil, err
		}
		q := watch.quantiles(0, 0.5, 0.99)
		return values{q[0], q[1], watch.rate(), greatest, float64(n)}, nil
	}}
}

// holdSnapshot opens a transaction that keeps vacuum from removing anything.
func (b *bench) holdSnapshot(ctx context.Context) (release func(), err error) {
	tx, err := b.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		return nil, err
	}
	release = func() { _ = tx.Rollback() } // it has written nothing
	if _, err := tx.ExecContext(ctx, `select pg_current_xact_id()`); err != nil {
		release()
		return nil, err
	}
	return release, nil
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

const loadIDs = `
alter table oncemill_grown.inbox disable trigger user;
insert into oncemill_grown.inbox (consumer, message_id, received_at)
select 'bench', gen_random_uuid()::text, now() - interval '2 hours'
from generate_series(1, %d);
alter table oncemill_grown.inbox enable trigger user`

// growthInbox has an inbox full of ids.
func growthInbox() scenario {
	return scenario{
		id: "growth-inbox", long: true, round: 45 * time.Second,
		sides: func(ctx context.Context, b *bench) ([]side, error) {
			consume := b.ours(inbox.Config{}, inFlight, grouped(addRow))
			return []side{
				b.consumingSide("10,000,000 ids", inboxBacklog, &consumption{traffic: b.traffic, schema: grownSchema, add: consume}),
				b.consumingSide("the same inbox, empty", inboxBacklog, &consumption{traffic: b.traffic, add: consume}),
			}, b.grown(ctx, fmt.Sprintf(loadIDs, grownIDs))
		},
		rows: []row{{"growth-inbox", "inbox with 10,000,000 ids", figure{0, 0}, figure{1, 0}, "msg/s", atLeast(0.8)}},
	}
}

// As the engine leaves them: some 300 bytes of response each.
const loadKeys = `
insert into oncemill_grown.idempotency (
	key_hash, caller, fingerprint, state, owner, fence, endpoint,
	created_at, completed_at, lease_until, expires_at, forget_at, status, response
)
select
	sha256(int8send(i)), substr(sha256('caller'), 1, 16), sha256(int8send(-i)), 2, substr(sha256(int8send(i)), 1, 16), 1, 'POST /orders',
	now(), now(), now(), now() + i * interval '1 ms', now() + interval '1 day' + i * interval '1 ms', 201,
	convert_to(repeat('response', 40), 'UTF8')
from generate_series(1::bigint, %d) as i`

// growthKeys posts with many records in the table.
func growthKeys() scenario {
	return scenario{
		id: "growth-keys", long: true, round: 40 * time.Second,
		sides: func(ctx context.Context, b *bench) ([]side, error) {
			db, err := b.postDB()
			if err != nil {
				return nil, err
			}
			if err := b.grown(ctx, fmt.Sprintf(loadKeys, grownKeys)); err != nil {
				return nil, err
			}
			full, err := b.middleware(db, grownSchema, postClients)
			if err != nil {
				return nil, err
			}
			empty, err := b.middleware(db, "", postClients)
			return []side{
				b.postingSide("5,000,000 records", full, `delete from oncemill_grown.idempotency where endpoint = 'POST /'`, false),
				b.postingSide("the same with none", empty, emptyKeys, false),
			}, err
		},
		rows: []row{{
			"growth-keys", "POST requests through TxMiddleware with 5,000,000 records in the table",
			figure{0, 0},
			figure{1, 0},
			"req/s", atLeast(0.8),
		}},
	}
}
