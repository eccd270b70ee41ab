package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"

	"github.com/oncemill/oncemill/outbox"
)

const forwarderTopic = "forwarder" // its table is watermill_forwarder

// forwarderSettings are what makes Watermill's forwarder faster. Zero values are its
// defaults.
type forwarderSettings struct {
	pool  int           // channels of the publisher; 0 opens one for each message
	batch int           // rows a read; 0 is 100
	poll  time.Duration // 0 is 1 s
}

func (s forwarderSettings) String() string {
	if s == (forwarderSettings{}) {
		return "Watermill's forwarder, default settings"
	}
	return fmt.Sprintf("Watermill's forwarder, pool %d, batch %d, poll %s", s.pool, s.batch, s.poll)
}

// forwarderBacklog is more than the fastest forwarder that was seen takes away in a run.
const forwarderBacklog = 15_000

// forwarders returns the forwarder with its best settings, and with its defaults.
func (b *bench) forwarders(ctx context.Context) (fastest, stock side, err error) {
	if err := b.initForwarder(ctx); err != nil {
		return side{}, side{}, err
	}
	const poll = 10 * time.Millisecond
	fastest, err = best(ctx, b, []forwarderSettings{{1, 100, poll}, {8, 100, poll}, {1, 1000, poll}, {8, 1000, poll}},
		forwarderBacklog/10, forwarderBacklog, b.forwarder)
	return fastest, b.forwarder(forwarderBacklog/3, forwarderSettings{}), err
}

// forwarder is a side that drains a backlog into RabbitMQ, with confirms, and measures
// from before connecting to the last confirm.
func (b *bench) forwarder(n int, s forwarderSettings) side {
	return side{name: s.String(), n: n, run: func(ctx context.Context, n int) (values, error) {
		if err := errors.Join(b.loadForwarder(ctx, n), b.settled(ctx), b.freshQueue()); err != nil {
			return nil, err
		}
		left := newCountdown(n)
		begin := time.Now()
		stop, err := b.startForwarder(ctx, s, func(string) { left.count() })
		if err != nil {
			return nil, err
		}
		err = left.await(ctx)
		took := time.Since(begin)
		if err := errors.Join(err, stop()); err != nil {
			return nil, err
		}
		return perSecond(n, took), b.verifyQueue(ctx, b.traffic, n, true)
	}}
}

func (b *bench) forwarderSubscriber(s forwarderSettings) (*watermillsql.Subscriber, error) {
	return watermillsql.NewSubscriber(b.db, watermillsql.SubscriberConfig{
		ConsumerGroup:    "bench",
		PollInterval:     s.poll,
		SchemaAdapter:    watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: s.batch},
		OffsetsAdapter:   watermillsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true,
	}, watermill.NopLogger{})
}

// initForwarder makes the forwarder's tables and its consumer group.
func (b *bench) initForwarder(ctx context.Context) error {
	sub, err := b.forwarderSubscriber(forwarderSettings{})
	if err != nil {
		return fmt.Errorf("forwarder: %w", err)
	}
	if _, err := sub.Subscribe(ctx, forwarderTopic); err != nil {
		return fmt.Errorf("forwarder: %w", err)
	}
	return sub.Close()
}

// startForwarder runs Watermill's forwarder daemon until stop is called.
func (b *bench) startForwarder(ctx context.Context, s forwarderSettings, confirmed func(id string)) (stop func() error, err error) {
	cfg := b.topology()
	cfg.Publish.ConfirmDelivery = true
	cfg.Publish.Mandatory = true
	cfg.Publish.ChannelPoolSize = s.pool
	publisher, err := wamqp.NewPublisher(cfg, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("forwarder: publisher: %w", err)
	}
	subscriber, err := b.forwarderSubscriber(s)
	if err != nil {
		return nil, fmt.Errorf("forwarder: subscriber: %w", err)
	}
	daemon, err := forwarder.NewForwarder(subscriber, &watchedPublisher{publisher, confirmed}, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: forwarderTopic})
	if err != nil {
		return nil, fmt.Errorf("forwarder: %w", err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- daemon.Run(ctx) }()
	select {
	case <-daemon.Running():
	case err := <-stopped:
		return nil, fmt.Errorf("forwarder: stopped early: %w", err)
	}
	return func() error { return errors.Join(daemon.Close(), <-stopped, publisher.Close()) }, nil
}

const (
	forwarderReset = `
truncate "watermill_forwarder";
update "watermill_offsets_forwarder" set offset_acked = 0, last_processed_transaction_id = '0'`

	forwarderStage = `
drop table if exists staged;
create unlogged table staged (uuid text, envelope json)`

	// Each message in its own transaction, as services commit them. Loading is not
	// measured, so it need not wait for the disk.
	forwarderCommitEach = `
do $$
declare r record;
begin
	set synchronous_commit = off;
	for r in select * from staged loop
		insert into "watermill_forwarder" (uuid, payload, metadata, transaction_id)
		values (r.uuid, r.envelope, '{}', pg_current_xact_id());
		commit;
	end loop;
	reset synchronous_commit;
end $$`
)

// loadForwarder fills the table that the forwarder reads. Payloads are wrapped as its own
// decorating publisher does it.
func (b *bench) loadForwarder(ctx context.Context, n int) error {
	if err := b.exec(ctx, "empty table", forwarderReset, forwarderStage, `checkpoint`); err != nil {
		return err
	}
	err := b.copyIn(ctx, "staged", []string{"uuid", "envelope"}, n, func(i int) ([]any, error) {
		envelope, err := json.Marshal(map[string]any{
			"destination_topic": topic,
			"uuid":              b.traffic.id(i),
			"payload":           b.traffic.payload(i),
			"metadata":          map[string]string{outbox.KeyMetadata: b.traffic.key(i)},
		})
		return []any{b.traffic.id(i), envelope}, err
	})
	if err != nil {
		return err
	}
	return b.exec(ctx, "load forwarder's table", forwarderCommitEach)
}
