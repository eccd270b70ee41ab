package mill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v4"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/repeats"
)

// Consumer handles the messages of one topic, each of them once. Messages that it cannot
// handle become dead letters, which operators can replay to it.
type Consumer struct {
	// Name identifies the consumer. Each consumer handles each message once. The name is
	// stored with each id, so it must stay the same across restarts and be the same in all
	// processes that share the work. Required.
	Name string

	// Topic is the topic it subscribes to. Required.
	Topic string

	// Subscriber makes the Watermill subscriber that delivers the messages, for example
	// inbox/rabbitmq.Queue or inbox/rabbitmq.New. With the Shards of inbox/rabbitmq.Config,
	// several processes keep the order of each key. Pass in.Refuse as Config.Malformed of New,
	// so that unreadable deliveries become dead letters. Two consumers must not share a
	// queue: each message would reach only one of them. New calls it once; Run
	// subscribes, retries while the broker is unavailable, and closes it. Required.
	Subscriber func(in *inbox.Inbox) (message.Subscriber, error)

	// Handler handles a message in the transaction that inbox.TxFromContext returns. The
	// messages that it returns are stored in that transaction. An error rolls it back;
	// see inbox.Permanent, inbox.RetryAfter and inbox.Unavailable. Required.
	Handler message.HandlerFunc

	// Produces is the topic of the messages that Handler returns. Default: none; returning
	// messages is an error.
	Produces string

	// Group lets messages of different keys share a transaction; see
	// inbox.Inbox.GroupMiddleware for what that requires of Handler. Default: false.
	Group bool

	// Middleware runs around each delivery, outside of the transaction, the first one
	// outermost. It must not return messages.
	Middleware []message.HandlerMiddleware

	// Inbox has further settings. Leave Consumer, Outbox, DeadLetters and Replays empty.
	Inbox inbox.Config

	// Replays publishes the messages of dead letters again, to ReplayTopic. It should reach
	// only this consumer. Required unless the subscriber is a message.Publisher itself:
	// inbox/rabbitmq's publishes to its own queue.
	Replays message.Publisher

	// ReplayTopic is the topic that Replays publishes to. Default: the topic that the
	// message was subscribed to.
	ReplayTopic string
}

// check reports missing and invalid settings.
func (c *Consumer) check(whole Config, bad report) {
	if c.Name == "" {
		bad("Name", `""`, "is required, for example stock")
	}
	if c.Topic == "" {
		bad("Topic", `""`, "is required")
	}
	if c.Subscriber == nil {
		bad("Subscriber", "nil", "is required")
	}
	if c.Handler == nil {
		bad("Handler", "nil", "is required")
	}
	if c.Produces != "" && whole.Outbox == nil {
		bad("Produces", strconv.Quote(c.Produces), "requires Config.Outbox; set it to &outbox.Config{}")
	}
	if slices.ContainsFunc(c.Middleware, func(m message.HandlerMiddleware) bool { return m == nil }) {
		bad("Middleware", "nil", "must not contain nil")
	}
	for _, of := range []struct {
		field string
		given bool
	}{
		{"Consumer", c.Inbox.Consumer != ""},
		{"Outbox", c.Inbox.Outbox != nil},
		{"DeadLetters", c.Inbox.DeadLetters != nil},
		{"Replays", c.Inbox.Replays != nil},
	} {
		if of.given {
			bad("Inbox."+of.field, "(given)", "must be empty; mill sets it")
		}
	}
	c.Inbox.Timeout = cmp.Or(c.Inbox.Timeout, time.Minute)
}

// consumer is a Consumer that is ready to run.
type consumer struct {
	Consumer
	log        *slog.Logger
	inbox      *inbox.Inbox
	subscriber message.Subscriber
	subscribed chan struct{} // closed after Subscribe has returned
}

// newConsumer creates the inbox of c. Its subscriber is still missing.
func (m *Mill) newConsumer(c Consumer) (made *consumer, err error) {
	made = &consumer{Consumer: c, log: m.cfg.Logger.With("consumer", c.Name), subscribed: make(chan struct{})}
	cfg := c.Inbox
	cfg.Consumer, cfg.DeadLetters, cfg.Replays = c.Name, m.letters, &inbox.Replays{Publisher: replays{made}}
	if c.ReplayTopic != "" {
		cfg.Replays.Topic = func(*dlq.Letter) string { return c.ReplayTopic }
	}
	if c.Produces != "" {
		cfg.Outbox = m.box
	}
	if made.inbox, err = inbox.New(m.db, cfg); err != nil {
		return nil, fmt.Errorf("consumer %s: %w", c.Name, err)
	}
	return made, nil
}

// makeSubscriber creates the subscriber. After an error there may be one to close.
func (c *consumer) makeSubscriber() (err error) {
	if c.subscriber, err = c.Subscriber(c.inbox); err != nil {
		c.subscriber = nil
		return fmt.Errorf("consumer %s: create subscriber: %w", c.Name, err)
	}
	if c.subscriber == nil {
		return &oncemill.ConfigError{Field: "mill.Consumer.Subscriber", Value: "nil", Problem: "it must return a subscriber or an error"}
	}
	return c.useSubscriber()
}

// useSubscriber uses the subscriber for replays if Replays is nil, and checks the timeouts.
func (c *consumer) useSubscriber() error {
	if c.Replays == nil {
		publisher, ok := c.subscriber.(message.Publisher)
		if !ok {
			return &oncemill.ConfigError{Field: "mill.Consumer.Replays", Value: "nil", Problem: fmt.Sprintf(
				"is required for consumer %s, since its subscriber cannot publish the replays", c.Name)}
		}
		c.Replays = publisher
	}
	limited, ok := c.subscriber.(interface{ AckTimeout() time.Duration })
	if ok && c.Inbox.Timeout >= limited.AckTimeout() {
		return &oncemill.ConfigError{Field: "mill.Consumer.Inbox.Timeout", Value: c.Inbox.Timeout.String(), Problem: fmt.Sprintf(
			"must be shorter than %v, the AckTimeout of consumer %s's subscriber; otherwise a handler that hangs never counts as failed", limited.AckTimeout(), c.Name)}
	}
	return nil
}

// source returns what the consumer receives from; "" if its subscriber does not report it.
func (c *consumer) source() string {
	if named, ok := c.subscriber.(interface{ Source(topic string) string }); ok {
		return named.Source(c.Topic)
	}
	return ""
}

// replays publishes with a consumer's Replays, which may be set after its inbox is created.
type replays struct{ of *consumer }

func (r replays) Publish(topic string, messages ...*message.Message) error {
	return r.of.Replays.Publish(topic, messages...)
}

// Close does nothing: the publisher is the caller's, or the subscriber.
func (replays) Close() error { return nil }

// run handles messages until ctx ends. Running handlers then have stopTimeout.
func (c *consumer) run(ctx context.Context, stopTimeout time.Duration) error {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: stopTimeout}, newRouterLog(c.log))
	if err != nil {
		return errors.Join(err, c.subscriber.Close())
	}
	subscription, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	// Closing ends a Subscribe that ignores its context.
	giveUp := context.AfterFunc(ctx, func() { cancel(); _ = c.subscriber.Close() })
	messages, err := c.subscribe(ctx, subscription)
	if err != nil || !giveUp() { // ctx has ended
		return c.subscriber.Close()
	}
	once := c.inbox.Middleware
	if c.Group {
		once = c.inbox.GroupMiddleware
	}
	var handler *message.Handler
	if from := (handingOut{ctx, messages}); c.Produces == "" {
		handler = router.AddConsumerHandler(c.Name, c.Topic, from, c.handleAlone)
	} else {
		handler = router.AddHandler(c.Name, c.Topic, from, c.Produces, noPublisher{}, c.Handler)
	}
	var handling atomic.Int64
	counted := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			handling.Add(1)
			defer handling.Add(-1)
			return h(msg)
		}
	}
	handler.AddMiddleware(append(append([]message.HandlerMiddleware{counted}, c.Middleware...), once)...)
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		<-router.Running() // otherwise Close and Run wait for each other
		_ = router.Close() // see below
	})
	err = router.Run(context.WithoutCancel(ctx))
	if stop() {
		return errors.Join(err, c.subscriber.Close())
	}
	// Close returns an error if handlers took too long, but not if the router has closed
	// itself because its subscription ended. So they are counted.
	<-closed
	if n := handling.Load(); n > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d handlers", ErrStillRunning, n))
	}
	return errors.Join(err, c.subscriber.Close())
}

// subscribe retries until the broker accepts the subscription or ctx ends.
func (c *consumer) subscribe(ctx, subscription context.Context) (<-chan *message.Message, error) {
	var failures repeats.Series
	wait := backoff.NewExponentialBackOff(backoff.WithInitialInterval(100*time.Millisecond), backoff.WithMaxInterval(10*time.Second), backoff.WithMaxElapsedTime(0))
	messages, err := backoff.RetryNotifyWithData(
		func() (<-chan *message.Message, error) { return c.subscriber.Subscribe(subscription, c.Topic) },
		backoff.WithContext(wait, ctx),
		func(err error, next time.Duration) {
			level, attrs := failures.Failed(slog.LevelWarn, err.Error())
			c.log.Log(ctx, level, "subscribe failed; retrying", append(attrs, "topic", c.Topic, "error", err, "next_in", next)...)
		})
	if err == nil {
		c.log.InfoContext(ctx, "consumer subscribed", "topic", c.Topic)
		close(c.subscribed)
	}
	return messages, err
}

// handleAlone is Handler of a consumer that produces nothing.
func (c *consumer) handleAlone(msg *message.Message) error {
	produced, err := c.Handler(msg)
	if err == nil && len(produced) > 0 {
		return fmt.Errorf("handler returned %d messages: %w", len(produced), errNoProduces)
	}
	return err
}

// handingOut is a subscriber with an existing subscription. It hands out no messages once
// ctx has ended, but leaves the subscription open, since many subscribers end the contexts
// of running handlers with it. Its channel stays open until the router closes: a router that
// loses its subscription before that reports an error.
type handingOut struct {
	ctx      context.Context //nolint:containedctx // until it ends; the router's does not
	messages <-chan *message.Message
}

// Subscribe hands out messages until the router ends routerCtx, which it always does when it
// closes. It does not always call Close: not if it closes before its goroutines have started.
func (h handingOut) Subscribe(routerCtx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for {
			select {
			case msg, open := <-h.messages:
				if !open {
					return
				}
				// The router takes it even while it closes. A nack could lose it, since some
				// brokers are configured to drop nacked messages.
				out <- msg
			case <-h.ctx.Done():
				<-routerCtx.Done()
				return
			case <-routerCtx.Done():
				return
			}
		}
	}()
	return out, nil
}

// Close does nothing: see Subscribe.
func (handingOut) Close() error { return nil }

// noPublisher is the publisher of handlers whose messages are in the outbox already.
type noPublisher struct{}

func (noPublisher) Publish(string, ...*message.Message) error { return errNotFromHandler }
func (noPublisher) Close() error                              { return nil }

// ready returns an error if the consumer does not receive messages now.
func (c *consumer) ready() error {
	select {
	case <-c.subscribed:
		own, ok := c.subscriber.(interface{ Ready() bool })
		if !ok || own.Ready() {
			return nil
		}
	default:
	}
	return fmt.Errorf("consumer %s: %w", c.Name, ErrNotSubscribed)
}
