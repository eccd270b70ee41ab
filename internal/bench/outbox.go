package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// migrate makes oncemill's tables in a schema; "" is the default one.
func (b *bench) migrate(ctx context.Context, schema string) error {
	return oncemill.Migrate(ctx, b.db, oncemill.Config{Schema: schema},
		outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations)
}

const emptyOutbox = `truncate oncemill.outbox, oncemill.outbox_history, oncemill.parked`

// fresh is an outbox without messages.
func (b *bench) fresh(ctx context.Context, cfg outbox.Config) (*outbox.Outbox, error) {
	cfg.Logger = b.log
	box, err := outbox.New(b.db, cfg)
	if err != nil {
		return nil, err
	}
	return box, b.exec(ctx, "empty outbox", emptyOutbox)
}

// loaded is an outbox with the first n messages of the traffic. They are newer than the
// latest checkpoint, like those of a relay that is not far behind.
func (b *bench) loaded(ctx context.Context, cfg outbox.Config, t *traffic, n int) (*outbox.Outbox, error) {
	box, err := b.fresh(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := b.exec(ctx, "begin of the log", `checkpoint`); err != nil {
		return nil, err
	}
	return box, publishAll(ctx, box, n, t.message)
}

// message i for our publisher.
func (t *traffic) message(i int) (string, *message.Message) {
	msg := message.NewMessage(t.id(i), t.payload(i))
	outbox.SetKey(msg, t.key(i))
	return topic, msg
}

// publishAll publishes n messages, many in a transaction.
func publishAll(ctx context.Context, box *outbox.Outbox, n int, message func(i int) (string, *message.Message)) error {
	const each = 1000
	for first := 0; first < n; first += each {
		if err := publishSome(ctx, box, first, min(first+each, n), message); err != nil {
			return err
		}
	}
	return nil
}

// publishSome publishes messages in a transaction.
func publishSome(ctx context.Context, box *outbox.Outbox, first, end int, next func(i int) (string, *message.Message)) error {
	return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		byTopic := map[string][]*message.Message{}
		for i := first; i < end; i++ {
			topic, msg := next(i)
			byTopic[topic] = append(byTopic[topic], msg)
		}
		for topic, msgs := range byTopic {
			if err := box.Publish(ctx, tx, topic, msgs...); err != nil {
				return err
			}
		}
		return nil
	})
}

// startRelay runs a relay until stop is called.
func (b *bench) startRelay(ctx context.Context, box *outbox.Outbox, sink relay.Sink, cfg relay.Config) (stop func() error, err error) {
	if cfg.Logger == nil {
		cfg.Logger = b.log
	}
	r, err := relay.New(box, sink, cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() { stopped <- r.Run(ctx) }()
	return func() error {
		cancel()
		return <-stopped
	}, nil
}

// drain runs a relay until it has relayed the n messages of the outbox, and returns the
// time from before its start to the deletion of the last row.
func (b *bench) drain(ctx context.Context, box *outbox.Outbox, n int, sink relay.Sink, cfg relay.Config) (took time.Duration, err error) {
	left := newCountdown(n)
	counted := &watchedSink{Sink: sink, confirmed: func(*relay.Message) { left.count() }}
	begin := time.Now()
	stop, err := b.startRelay(ctx, box, counted, cfg)
	if err != nil {
		return 0, err
	}
	if err = left.await(ctx); err == nil {
		err = b.awaitEmpty(ctx)
	}
	took = time.Since(begin)
	return took, errors.Join(err, stop(), counted.failed())
}

// Served by the primary keys (lane, id) of the partitions: a probe of each lane.
const outboxHasRows = `
select exists (
	select
	from generate_series(0, 31) as l (lane)
	cross join lateral (select from oncemill.outbox o where o.lane = l.lane order by o.id limit 1) m
)`

// awaitEmpty returns when the outbox is empty.
func (b *bench) awaitEmpty(ctx context.Context) error {
	for {
		var left bool
		if err := b.db.QueryRowContext(ctx, outboxHasRows).Scan(&left); err != nil || !left {
			return err
		}
		if err := pauseFor(ctx, time.Millisecond); err != nil {
			return fmt.Errorf("the outbox is not empty: %w", err)
		}
	}
}
