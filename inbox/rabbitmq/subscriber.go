package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
)

// Subscriber consumes from RabbitMQ. It is a Watermill message.Subscriber and safe for
// concurrent use. It has one connection, made by the first Subscribe, with one channel for
// each subscription, and further ones to publish and to measure. It is also a
// message.Publisher, for replays of dead letters.
type Subscriber struct {
	settings   *settings
	connector  *connector
	publishing *connector
	depths     *depths
	closing    chan struct{}
	ending     sync.Once    // Close
	exits      atomic.Bool  // the marshaler or Config.Key has ended a goroutine
	opening    atomic.Int64 // calls of retried

	mu        sync.Mutex
	closed    bool
	group     sync.WaitGroup // subscriptions and calls; none is added once closed
	current   map[*subscription]struct{}
	measuring bool
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.Publisher            = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// New returns a subscriber that consumes as cfg configures it, with its queues, bindings,
// marshaler and connection settings. It does no I/O. All bad values are reported at once,
// each as a *oncemill.ConfigError.
//
// cfg.Consume.Qos.PrefetchCount is the number of messages of a subscription that are
// handled at once; watermill-amqp's constructors set it to 1. Its default marshaler is
// replaced by [Marshaler], which reads the same and more. With cfg.Consume.NoRequeueOnNack
// a nacked message is rejected, which leaves it to the dead-letter exchange of the queue,
// or drops it if there is none.
func New(cfg wamqp.Config, opts Config) (*Subscriber, error) {
	s, err := resolve(cfg, opts)
	if err != nil {
		return nil, err
	}
	depths, err := newDepths(s)
	if err != nil {
		return nil, err
	}
	return &Subscriber{
		settings:   s,
		connector:  newConnector(s),
		publishing: newConnector(s),
		depths:     depths,
		closing:    make(chan struct{}),
		current:    make(map[*subscription]struct{}),
	}, nil
}

// Subscribe declares the queue of the topic, or its shards, and the binding, and consumes
// from it, until ctx ends or the subscriber is closed. An error means that this could not be done now.
// After success the subscription reconnects, declares and consumes again as often as
// needed.
//
// The context of a message has the values of ctx, but does not end with ctx. It ends when
// the message is acknowledged or nacked, or Config.CloseTimeout after the end of the
// subscription. A handler that runs meanwhile can finish, and its acknowledgement counts.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if s.settings.Shards.Count > 0 {
		return s.subscribeShards(ctx, topic)
	}
	sub, err := s.begin(topic)
	if err != nil {
		return nil, err
	}
	first, err := sub.open(ctx)
	if err != nil {
		s.end(sub)
		return nil, fmt.Errorf("rabbitmq: subscribe to %q: %w", topic, err)
	}
	s.enter(sub)
	go func() { // Close waits for it
		defer s.end(sub)
		sub.run(ctx, first)
	}()
	return sub.out, nil
}

// SubscribeInitialize declares the queue of the topic, or its shards, and the binding, so that messages
// are kept from now on.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	sub, err := s.begin(topic)
	if err != nil {
		return err
	}
	defer s.end(sub)
	initialize := sub.initialize
	if s.settings.Shards.Count > 0 {
		initialize = func() error { return s.initializeShards(topic) }
	}
	if err := initialize(); err != nil {
		return fmt.Errorf("rabbitmq: initialize %q: %w", topic, err)
	}
	return nil
}

// Close ends all subscriptions. No further message is handed out; messages that are being
// handled get Config.CloseTimeout. It returns when the broker has seen all
// acknowledgements and the connection is closed. Messages that were not acknowledged are
// in their queue again. Another call waits for the same.
func (s *Subscriber) Close() error {
	s.ending.Do(func() {
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		close(s.closing)
		s.group.Wait()
		s.connector.close()
		s.publishing.close()
		s.depths.asking.close()
		_ = s.depths.registration.Unregister() // it ends with its provider
	})
	return nil
}

// Ready reports whether every subscription has its consumer. It is false while there is no
// subscription. It is meant for readiness probes.
func (s *Subscriber) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.opening.Load() > 0 {
		return false
	}
	for sub := range s.current {
		if !sub.consuming.Load() {
			return false
		}
	}
	return len(s.current) > 0
}

// AckTimeout returns Config.AckTimeout: how long a delivery may remain unacknowledged.
func (s *Subscriber) AckTimeout() time.Duration { return s.settings.AckTimeout }

// begin makes Close wait until end is called.
func (s *Subscriber) begin(topic string) (*subscription, error) {
	if err := s.hold(); err != nil {
		return nil, err
	}
	topology := s.settings.topology
	return newSubscription(s, topic, topology.Queue.GenerateName(topic), topology.Exchange.GenerateName(topic)), nil
}

// hold makes Close wait until group.Done is called.
func (s *Subscriber) hold() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	s.group.Add(1)
	return nil
}

func (s *Subscriber) enter(sub *subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current[sub] = struct{}{}
	if !s.measuring {
		s.measuring = true
		s.group.Go(s.measure)
	}
}

func (s *Subscriber) end(sub *subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.current, sub)
	s.group.Done()
}

// initialize declares what the subscription needs.
func (s *subscription) initialize() error {
	return s.owner.onChannel(untilClosed{s.owner.closing}, s.owner.connector, func(_ *link, channel *amqp.Channel) error { return s.declare(channel) })
}

// onChannel runs requests on a channel of their own.
func (s *Subscriber) onChannel(ctx context.Context, c *connector, requests func(l *link, channel *amqp.Channel) error) error {
	l, err := c.get(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return l.within(func() error {
		channel, err := l.conn.Channel()
		if err != nil {
			return fmt.Errorf("open a channel: %w", err)
		}
		closed := channel.NotifyClose(make(chan *amqp.Error, 1))
		err = requests(l, channel)
		if errors.Is(err, ErrClosed) { // the connection ends now
			return err
		}
		return errors.Join(withReason(err, closed), channel.Close())
	})
}

// untilClosed is the context of a call to which Watermill passes none; it ends when the
// subscriber is closed.
type untilClosed struct{ closing <-chan struct{} }

func (c untilClosed) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c untilClosed) Done() <-chan struct{}       { return c.closing }
func (c untilClosed) Value(any) any               { return nil }

func (c untilClosed) Err() error {
	select {
	case <-c.closing:
		return ErrClosed
	default:
		return nil
	}
}
