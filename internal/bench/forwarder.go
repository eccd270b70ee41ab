package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
)

const forwarderTopic = "forwarder" // its table is watermill_forwarder

// forwarderSettings are the knobs that make Watermill's forwarder faster. Zero
// values are its defaults.
type forwarderSettings struct {
	pool  int           // channels of the publisher; 0 opens one for each message
	batch int           // rows a read; 0 is 100
	poll  time.Duration // 0 is 1 s
}

func (s forwarderSettings) String() string {
	if s == (forwarderSettings{}) {
		return "default settings"
	}
	return fmt.Sprintf("pool %d, batch %d, poll %s", s.pool, s.batch, s.poll)
}

// forwarderCandidates are tried in addition to the defaults.
var forwarderCandidates = []forwarderSettings{
	{pool: 1, batch: 100, poll: 10 * time.Millisecond},
	{pool: 8, batch: 100, poll: 10 * time.Millisecond},
	{pool: 1, batch: 1000, poll: 10 * time.Millisecond},
	{pool: 8, batch: 1000, poll: 10 * time.Millisecond},
}

func newForwarderSubscriber(db *sql.DB, s forwarderSettings) (*watermillsql.Subscriber, error) {
	return watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
		ConsumerGroup:    "bench",
		PollInterval:     s.poll,
		SchemaAdapter:    watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: s.batch},
		OffsetsAdapter:   watermillsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true,
	}, watermill.NopLogger{})
}

// initForwarder makes the forwarder's tables and its consumer group.
func initForwarder(ctx context.Context, db *sql.DB) error {
	sub, err := newForwarderSubscriber(db, forwarderSettings{})
	if err != nil {
		return fmt.Errorf("forwarder: %w", err)
	}
	if _, err := sub.Subscribe(ctx, forwarderTopic); err != nil {
		return fmt.Errorf("forwarder: %w", err)
	}
	return sub.Close()
}

// runForwarder runs Watermill's forwarder daemon until it has published n
// messages with confirms, and returns the time from before connecting to the
// last confirm.
func runForwarder(ctx context.Context, db *sql.DB, cfg amqp.Config, s forwarderSettings, n int) (took time.Duration, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begin := time.Now()
	cfg.Publish.ConfirmDelivery = true
	cfg.Publish.Mandatory = true
	cfg.Publish.ChannelPoolSize = s.pool
	publisher, err := amqp.NewPublisher(cfg, watermill.NopLogger{})
	if err != nil {
		return 0, fmt.Errorf("forwarder: publisher: %w", err)
	}
	defer publisher.Close()
	subscriber, err := newForwarderSubscriber(db, s)
	if err != nil {
		return 0, fmt.Errorf("forwarder: subscriber: %w", err)
	}
	counted := &countingPublisher{Publisher: publisher, all: make(chan struct{})}
	counted.left.Store(int64(n))
	daemon, err := forwarder.NewForwarder(subscriber, counted, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: forwarderTopic})
	if err != nil {
		return 0, fmt.Errorf("forwarder: %w", err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- daemon.Run(ctx) }()
	select {
	case <-counted.all:
		took = time.Since(begin)
	case err := <-stopped:
		return 0, fmt.Errorf("forwarder: stopped early: %w", err)
	case <-ctx.Done():
		err = fmt.Errorf("forwarder: %w with %d of %d messages left", ctx.Err(), counted.left.Load(), n)
	}
	return took, errors.Join(err, daemon.Close(), <-stopped)
}

// countingPublisher closes all when left messages have been published.
type countingPublisher struct {
	message.Publisher
	left atomic.Int64
	all  chan struct{}
}

func (p *countingPublisher) Publish(topic string, messages ...*message.Message) error {
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	if p.left.Add(-int64(len(messages))) == 0 {
		close(p.all)
	}
	return nil
}
